"""The multi-device benchmark on eight simulated devices, at small size, from a checkpoint in several files on disk."""

import json
import subprocess
import sys

import pytest

from tests.checkpoints.builders import LLAMA_CONFIG, model_tensors, write_folder
from tests.parallel.test_meshes import REPOSITORY, environment


@pytest.mark.slow
def test_throughput_on_eight_devices(tmp_path):
    config = LLAMA_CONFIG | {
        "hidden_size": 64,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "max_position_embeddings": 2048,
    }
    folder = write_folder(tmp_path / "model", config, model_tensors(config), shards=3)
    assert len(list(folder.glob("*.safetensors"))) == 3
    rows = {}
    for size in (1, 8):
        path = tmp_path / f"tensor_{size}.json"
        words = f"bench throughput --model {folder} --lengths 300,700 --batches 1,3 --top-p 0.5 --dtype float32"
        words += f" --pool-gib 0.05 --tensor-parallel-size {size} --json {path}"
        program = "from uniprefill_jax.cli import main; main()"
        command = [sys.executable, "-W", "error", "-c", program, *words.split()]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment(8), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        rows[size] = json.loads(path.read_text())["rows"]
    assert [row["tp"] for row in rows[8]] == [8] * 8
    for one, eight in zip(rows[1], rows[8], strict=True):
        for same in ("n", "batch", "method", "kept_fraction", "preemptions"):
            assert one[same] == eight[same], same
        # Among others a request goes on from a drop in the step in which the device has counted what is left of it:
        # how many pages are held at a time then depends on how fast that is.
        if one["method"] == "dense" or one["batch"] == 1:
            assert one["pages"] == eight["pages"]
        assert eight["tokens_per_s"] > 0
    dropping = [row for row in rows[8] if row["method"] != "dense"]
    assert len(dropping) == 4 and all(row["kept_fraction"] < 1 for row in dropping)
