"""Whole models, cut to a layer or two, compile for meshes of TPUs that are not there: `make tpu-aot` in small."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.kernels.test_ahead_of_time import REPOSITORY, compiler_python


@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [
        (["--only=qwen3-next-80b-a3b", "--layers=1", "--lengths=512"], {"gated_delta_rule", "grouped_matmul"}),
        # Two layers, so that tokens are dropped between them.
        pytest.param(
            ["--only=llama-3.1-8b", "--topology=v5e:2x4", "--layers=2", "--lengths=320"],
            {"block_score", "top_p_select", "causal_attention"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_short_model_compiles_for_eight_chips(arguments: list[str], kernels: set[str], tmp_path: Path) -> None:
    result = tmp_path / "tpu_aot.json"
    command = [compiler_python("tpu"), "-m", "benchmarks.tpu_aot", *arguments, f"--json={result}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    prefill, decode = json.loads(result.read_text())["rows"]
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    assert prefill["fits"] and decode["fits"]
    assert set(prefill["kernels"]) == kernels
    assert "GiB per chip" in done.stdout and prefill["topology"] in done.stdout
