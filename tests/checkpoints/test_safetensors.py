"""Safetensors: slices equal the library's, only the slice is read, and every kind of damage is one clear line."""

import json
import resource
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from checkpoints_convert import open_checkpoint
from tests.checkpoints.builders import LLAMA_CONFIG, write_folder, write_raw_safetensors, write_safetensors
from uniprefill_jax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
TENSORS = {name: np.full((3, 2), number, np.float32) for number, name in enumerate("abcdef")}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder of three shards with two tensors each."""
    return write_folder(tmp_path / "model", LLAMA_CONFIG, TENSORS, shards=3)


def refusal(path: Path) -> str:
    """The message with which a checkpoint is refused; it is one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def edit_index(folder: Path, **changes: str | None) -> None:
    """Point tensors to other files in the index, or (None) leave them out."""
    path = folder / INDEX
    weight_map = {**json.loads(path.read_text())["weight_map"], **changes}
    path.write_text(json.dumps({"weight_map": {name: file for name, file in weight_map.items() if file is not None}}))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_slices_equal_numpy(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    dtype = data.draw(st.sampled_from(["f4", "f8", "f2", "i8", "u1", "?", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
    parts = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        start = data.draw(st.integers(0, size))
        parts.append(slice(start, data.draw(st.integers(start, size))))
    folder = write_folder(tmp_path_factory.mktemp("slices"), {}, {"before": np.ones(3, np.uint8), "x": array})
    read = open_checkpoint(folder).read("x", tuple(parts))
    expected = array[tuple(parts)]
    assert (read.shape, read.dtype) == (expected.shape, expected.dtype)
    assert read.tobytes() == expected.tobytes()


def test_whole_files_equal_the_safetensors_library(sharded: Path):
    source = open_checkpoint(sharded)
    expected = {}
    for file in sharded.glob("*.safetensors"):
        expected.update(load_file(file))
    assert source.kind == "safetensors" and source.config == LLAMA_CONFIG
    assert set(source.tensors) == set(expected)
    for name, array in expected.items():
        assert source.tensors[name].shape == array.shape
        np.testing.assert_array_equal(source.read(name), array)


def test_only_the_slice_is_read(tmp_path: Path):
    rows, columns = 1 << 20, 1 << 15
    size = rows * columns * 2
    header = json.dumps({"w": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, size]}}).encode()
    file = tmp_path / "model.safetensors"
    write_raw_safetensors(file, header, b"")
    with file.open("r+b") as stream:
        stream.truncate(8 + len(header) + size)  # 64 GiB of hole
        stream.seek(8 + len(header) + (7 * columns + 5) * 2)
        stream.write(np.array([1.5], ml_dtypes.bfloat16).tobytes())
    (tmp_path / "config.json").write_text("{}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = open_checkpoint(tmp_path)
    read = source.read("w", (slice(6, 9), slice(4, 7)))
    np.testing.assert_array_equal(read.astype(np.float32), [[0, 0, 0], [0, 1.5, 0], [0, 0, 0]])
    assert source.read("w", (slice(rows - 2, rows),)).shape == (2, columns)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_nested_text_model_names_are_flattened(tmp_path: Path):
    names = {
        "language_model.model.layers.0.x": "model.layers.0.x",
        "model.language_model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "vision_tower.x": "vision_tower.x",
    }
    folder = write_folder(tmp_path / "m", {}, {name: np.ones(1, np.float32) for name in names})
    assert set(open_checkpoint(folder).tensors) == set(names.values())
    both = {"model.norm.weight": np.ones(1, np.float32), "language_model.model.norm.weight": np.ones(1, np.float32)}
    assert "are the same one" in refusal(write_folder(tmp_path / "both", {}, both))


def test_a_single_file_needs_its_config_beside_it(tmp_path: Path):
    folder = write_folder(tmp_path / "m", LLAMA_CONFIG, TENSORS)
    assert open_checkpoint(folder / "model.safetensors").config == LLAMA_CONFIG
    (folder / "config.json").unlink()
    assert "config.json: no such file" in refusal(folder / "model.safetensors")
    (folder / "config.json").write_text("{ not json")
    assert "not readable as JSON" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "expected an object" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"abc", b"hello, this is a text file named .safetensors\n" * 9, bytes(64)])
def test_files_that_are_not_safetensors(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "safetensors" in refusal(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = write_folder(tmp_path_factory.mktemp("cut"), {}, TENSORS)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert "model.safetensors" in refusal(folder)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    """One header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry()}, 12, "longer than its header says"),
        ({"a": entry()}, 4, "cut short"),
        ({"a": entry(offsets=(4, 12))}, 12, "starts at byte 4, expected 0"),
        ({"a": entry(), "b": entry()}, 8, "starts at byte 0, expected 8"),
        ({"a": entry(shape=(3,))}, 8, "needs 12 bytes"),
        ({"a": entry(shape=(-2,))}, 8, "header entry of a is corrupt"),
        ({"a": entry(shape=("2",))}, 8, "header entry of a is corrupt"),
        ({"a": entry(offsets=(8,))}, 8, "header entry of a is corrupt"),
        ({"a": entry(dtype="F4")}, 8, "dtype 'F4'"),
        ({"a": {"dtype": "F32"}}, 8, "header entry of a is corrupt"),
        ({"a": 3}, 8, "header entry of a is corrupt"),
        (b'{"a": ', 8, "header is corrupt"),
        (b'{"a": {}, "a": {}}', 8, "a is described twice"),
        (b'{"\xff": {}}', 8, "cannot be read"),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: dict[str, object] | bytes, size: int, message: str):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_raw_safetensors(tmp_path / "model.safetensors", raw, bytes(size))
    (tmp_path / "config.json").write_text("{}")
    assert message in refusal(tmp_path)


def test_header_length_that_overruns_the_file(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{" + bytes(99))
    (tmp_path / "config.json").write_text("{}")
    assert "header of 1000 bytes in a file of 108" in refusal(tmp_path)


def test_a_file_that_shrinks_after_opening(tmp_path: Path):
    folder = write_folder(tmp_path / "m", {}, TENSORS)
    source = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="when it was opened"):
        source.read("a")


def test_a_missing_shard(sharded: Path):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "1 of 3 shards named by" in refusal(sharded)


def test_a_surplus_shard(sharded: Path):
    shutil.copyfile(sharded / "model-00001-of-00003.safetensors", sharded / "model-00001-of-00002.safetensors")
    assert "names 3 shards, the folder holds 1 more (model-00001-of-00002.safetensors)" in refusal(sharded)


def test_an_index_with_fewer_shards_than_the_names_say(sharded: Path):
    edit_index(sharded, c=None, f=None)
    (sharded / "model-00003-of-00003.safetensors").unlink()
    assert "names 2 shards, but model-00001-of-00003.safetensors says 3" in refusal(sharded)


def test_an_index_that_disagrees_with_the_shards(sharded: Path):
    edit_index(sharded, ghost="model-00001-of-00003.safetensors")
    assert "lacks tensors that" in refusal(sharded) and "ghost" in refusal(sharded)
    edit_index(sharded, ghost=None, a=None)
    assert "does not list (a)" in refusal(sharded)
    edit_index(sharded, a="model-00002-of-00003.safetensors")
    assert "tensor a is in model-00001" in refusal(sharded)
    edit_index(sharded, a="../elsewhere.safetensors")
    assert "which is not a file name" in refusal(sharded)


def test_an_index_without_a_weight_map(sharded: Path):
    (sharded / INDEX).write_text("{}")
    assert "has no weight_map" in refusal(sharded)
    (sharded / INDEX).write_text("")
    assert "not readable as JSON" in refusal(sharded)


def test_a_tensor_in_two_shards(sharded: Path):
    write_safetensors(sharded / "model-00002-of-00003.safetensors", {name: TENSORS[name] for name in "abe"})
    assert "tensor a is in both" in refusal(sharded)


def test_files_that_contradict_each_other(sharded: Path):
    write_safetensors(sharded / "model.safetensors", TENSORS)
    assert "holds both model.safetensors and" in refusal(sharded)
    (sharded / "model.safetensors").unlink()
    (sharded / INDEX).unlink()
    assert f"but no {INDEX}" in refusal(sharded)


def test_several_unnumbered_files(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "one.safetensors", TENSORS)
    assert set(open_checkpoint(tmp_path).tensors) == set(TENSORS)
    write_safetensors(tmp_path / "two.safetensors", TENSORS)
    assert "2 .safetensors files (one.safetensors, two.safetensors)" in refusal(tmp_path)


def test_paths_that_hold_no_checkpoint(tmp_path: Path):
    assert "no such file or folder" in refusal(tmp_path / "nowhere")
    assert "holds no checkpoint" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert ".bin files" in refusal(tmp_path)
    assert "not a kind of checkpoint" in refusal(tmp_path / "pytorch_model.bin")
