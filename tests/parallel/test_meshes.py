"""Tensor and data parallel runs give what one device gives: kept sets, logits, tokens (in processes of their own)."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel.models import CONFIGS, SETTINGS, write_checkpoint
from tests.parity.compare import LOGIT_TOLERANCE

REPOSITORY = Path(__file__).parents[2]
# Tiny programs run once: compiling without optimisation takes a third of the time.
UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def environment(devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} {UNOPTIMISED}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def simulated(amount: str) -> list[dict[str, Any]]:
    """What the script with eight devices reports."""
    command = [sys.executable, "-W", "error", "-m", "tests.parallel.simulated", amount]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def quick() -> list[dict[str, Any]]:
    return simulated("quick")


def of(report: list[dict[str, Any]], check: str) -> list[dict[str, Any]]:
    found = [line for line in report if line["check"] == check]
    assert found, f"no {check} in the report"
    return found


def assert_meshes_agree(report: list[dict[str, Any]]) -> None:
    for seen in of(report, "mesh"):
        print(f"{seen['model']} tensor {seen['tensor']} data {seen['data']}: logit error {seen['logit_error']:.1e}")
        assert all(dropped > 0 for dropped in seen["dropped"]), seen
        assert not seen["differences"], f"request, layer and cut margins of kept sets that differ: {seen}"
        assert seen["logit_error"] <= LOGIT_TOLERANCE, seen
        assert seen["tokens_equal"] in (True, None), seen


def assert_ragged_agree(report: list[dict[str, Any]]) -> None:
    for seen in of(report, "ragged"):
        print(f"{seen['batches']} ragged batches of {seen['model']}: logit error {seen['logit_error']:.1e}")
        for judged in seen["judged"]:
            print(judged)
        assert seen["dropped"] > 0
        assert not seen["differences"], f"request, layer and cut margins of kept sets that differ: {seen}"
        assert seen["logit_error"] <= LOGIT_TOLERANCE, seen
        # What is further apart is what the float64 model becomes by rounding, or by the other choice in a near tie.
        assert all(judged["holds"] for judged in seen["judged"]), seen
        assert len(seen["judged"]) <= seen["batches"] / 20, seen


def assert_engines_agree(report: list[dict[str, Any]]) -> None:
    for seen in of(report, "engine"):
        print(f"engine of {seen['model']} on tensor {seen['tensor']}: logit error {seen['logit_error']:.1e}")
        assert not seen["differences"], f"request, layer and cut margins of kept sets that differ: {seen}"
        assert seen["logit_error"] <= LOGIT_TOLERANCE, seen
        assert seen["tokens_equal"], seen
        # Each shard's pages hold its own KV heads, or the one that it reads.
        kv_heads = CONFIGS[seen["model"]]["num_key_value_heads"]
        assert seen["heads_per_shard"] == max(kv_heads // seen["tensor"], 1)
        assert seen["pages_in_use"] == 0


def test_every_family_is_the_same_on_every_mesh(quick) -> None:
    assert_meshes_agree(quick)
    assert {(seen["tensor"], seen["data"]) for seen in of(quick, "mesh")} == {(2, 2), (4, 1), (8, 1)}
    assert [seen["model"] for seen in of(quick, "mesh") if seen["tokens_equal"]] == ["gemma"]


def test_engines_on_a_mesh_give_the_tokens_of_one_device(quick) -> None:
    assert_engines_agree(quick)
    assert [seen["tensor"] for seen in of(quick, "engine")] == [8, 4]
    assert "2 data replicas and an engine runs one" in of(quick, "engine_refused")[0]["message"]


def test_ragged_batches_are_the_same_on_every_mesh(quick) -> None:
    assert_ragged_agree(quick)


def test_a_checkpoint_moves_between_meshes(quick) -> None:
    assert of(quick, "moved")[0]["equal"]


def test_loading_holds_little_more_than_the_shards(quick) -> None:
    (seen,) = of(quick, "memory")
    print(f"peak {seen['peak']} bytes, shards {seen['held']}")
    # The shards come on top where they lie in host memory too, as they do here: 1.3 times the shards in all.
    assert seen["peak"] <= 0.3 * seen["held"]


def test_the_compile_cache_tells_meshes_apart(quick) -> None:
    (seen,) = of(quick, "cache")
    assert seen["entries"] == [1, 2, 2]
    assert seen["tokens"] == [[0, 1, 2, 3]] * 3


def test_meshes_that_do_not_fit_are_refused(quick) -> None:
    undivided, too_many, none = of(quick, "refused")[0]["messages"]
    assert "3 shards, which do not divide 8 attention heads" in undivided
    assert "tensor_parallel_size of 1, 2, 4, 8" in undivided
    assert "needs 16 devices, there are 8" in too_many
    assert "tensor_parallel_size is 0" in none


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("model", SETTINGS)
def test_all_meshes_engines_and_300_ragged_batches(model: str) -> None:
    report = simulated(model)
    assert_meshes_agree(report)
    assert_engines_agree(report)
    assert_ragged_agree(report)
    assert [len(of(report, check)) for check in ("mesh", "engine", "ragged")] == [7, 4, 1]


@pytest.mark.parametrize("serves", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["prefill", "engine"])
def test_two_processes_are_the_same_as_one_device(quick, tmp_path: Path, serves: bool) -> None:
    model = "gemma" if serves else "llama"
    folder = write_checkpoint(tmp_path / model, model)
    single = next(seen for seen in of(quick, "single") if seen["model"] == model)
    address = free_address()
    module = [sys.executable, "-W", "error", "-m", "tests.parallel.two_processes"]
    processes = [
        subprocess.Popen(
            [*module, address, str(number), model, str(folder), *["engine"] * serves],
            cwd=REPOSITORY,
            env=environment(1),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for process, (output, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
        seen = json.loads(output.splitlines()[-1])
        assert seen["bytes_read"] < 0.55 * stored
        assert "data replicas on devices of several processes" in seen["refused"]
        assert seen["tokens"] == (single["tokens"] if serves else None)
        for ours, theirs in zip(seen["results"], single["results"], strict=True):
            assert ours["kept"] == theirs["kept"], (ours["cut_margin"], theirs["cut_margin"])
            error = np.linalg.norm(np.subtract(ours["logits"], theirs["logits"]))
            assert error <= LOGIT_TOLERANCE * np.linalg.norm(theirs["logits"])
