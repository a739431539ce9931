"""Orbax folders: what comes back is what was saved, bit for bit, and damage or failure is one clear line."""

import json
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from checkpoints_convert import open_checkpoint, save_orbax
from checkpoints_convert.orbax_store import MANIFEST_NAME, OrbaxSource
from uniprefill_jax.errors import CheckpointError

CONFIG = {"model_type": "llama", "vocab_size": 48, "name": "naïve"}


def awkward_values(dtype: str) -> jax.Array:
    """Every bit pattern of bfloat16, and as many of float32: NaNs with payloads, infinities, subnormals, -0."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "float32":
        return jnp.asarray((patterns.astype(np.uint32) << 16 | patterns[::-1]).view(np.float32).reshape(4, -1))
    return jnp.asarray(patterns.view(jnp.bfloat16).reshape(4, -1))


PARAMETERS = {
    "layers.full_dense.attention.q_proj": jnp.arange(24.0).reshape(2, 3, 4),
    "layers.full_dense.norm": jnp.ones((2, 3), jnp.bfloat16),
    "embedding": awkward_values("bfloat16"),
    "lm_head": awkward_values("float32"),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder that tests must not change."""
    folder = tmp_path_factory.mktemp("orbax") / "converted"
    save_orbax(folder, PARAMETERS, CONFIG)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "converted"))


def opened(folder: Path) -> OrbaxSource:
    """The folder as an Orbax source."""
    source = open_checkpoint(folder)
    assert isinstance(source, OrbaxSource)
    return source


def refusal(folder: Path) -> str:
    """The message with which opening and reading everything is refused; it is one line."""
    with pytest.raises(CheckpointError) as caught:
        source = open_checkpoint(folder)
        for name in source.tensors:
            source.read(name)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def same_bits(a: jax.Array | np.ndarray, b: jax.Array | np.ndarray) -> bool:
    """Equal dtype, shape and bytes, so that NaN equals NaN."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_round_trip_is_bit_identical(pristine: Path):
    source = opened(pristine)
    assert source.kind == "orbax" and source.config == CONFIG and set(source.tensors) == set(PARAMETERS)
    place = SingleDeviceSharding(jax.devices()[0])
    for name, array in PARAMETERS.items():
        assert source.tensors[name].shape == array.shape and source.tensors[name].dtype == array.dtype
        assert same_bits(source.read(name), array)
        assert same_bits(source.restore(name, array.dtype, None), array)
        restored = source.restore(name, array.dtype, place)
        assert same_bits(restored, array) and restored.sharding == place


def test_slices_and_other_dtypes(pristine: Path):
    source = opened(pristine)
    name = "layers.full_dense.attention.q_proj"
    assert same_bits(source.read(name, (slice(1, 2), slice(0, 2))), PARAMETERS[name][1:2, 0:2])
    assert same_bits(source.restore(name, np.dtype(jnp.bfloat16), None), PARAMETERS[name].astype(jnp.bfloat16))


def test_every_lost_or_shortened_file_is_noticed(folder: Path):
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    assert len(files) > 8
    for file in files:
        content = file.read_bytes()
        file.unlink()
        assert refusal(folder)
        if content:
            file.write_bytes(content[:-2])  # JSON files end in a brace and a line break
            assert refusal(folder)
        file.write_bytes(content)
    assert same_bits(open_checkpoint(folder).read("lm_head"), PARAMETERS["lm_head"])


def test_every_flipped_byte_of_the_parameters_is_noticed(folder: Path):
    generator = np.random.default_rng(0)
    for file in sorted((folder / "parameters").rglob("*")):
        if file.is_file() and file.stat().st_size:
            content = bytearray(file.read_bytes())
            content[generator.integers(len(content))] ^= 1 << generator.integers(8)
            original = file.read_bytes()
            file.write_bytes(content)
            assert "contents changed since the conversion" in refusal(folder)
            file.write_bytes(original)


def test_surplus_files_are_named(folder: Path):
    (folder / "parameters" / "extra.bin").write_bytes(b"x")
    assert "did not write (extra.bin)" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("{}", "format is None, this version reads 1"),
        ('{"format": 2}', "format is 2, this version reads 1"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 1, "files": {"a": 3}, "parameters": {}}', "is damaged"),
        ('{"format": 1, "files": {}, "parameters": {"a": {"shape": [1], "dtype": "float31"}}}', "is damaged"),
    ],
)
def test_a_damaged_manifest(folder: Path, content: str, message: str):
    (folder / MANIFEST_NAME).write_text(content)
    assert message in refusal(folder)


def test_a_manifest_that_disagrees_with_the_arrays(folder: Path):
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["parameters"]["embedding"]["shape"] = [1, 2]
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert "embedding is bfloat16 [4, 16384]" in refusal(folder)
    del manifest["parameters"]["embedding"]
    manifest["parameters"]["ghost"] = {"shape": [1], "dtype": "float32"}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert "has no array ghost" in refusal(folder)


class FailingTokenizer:
    """A tokenizer whose files cannot be written."""

    def __init__(self, error: BaseException):
        self.error = error

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("half")
        raise self.error


def test_nothing_is_left_after_a_failure(tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_orbax(tmp_path / "deep" / "out", PARAMETERS, CONFIG, FailingTokenizer(OSError("disk full")))
    assert list((tmp_path / "deep").iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        save_orbax(tmp_path / "out", PARAMETERS, CONFIG, FailingTokenizer(KeyboardInterrupt()))
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_a_disk_that_takes_no_more(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # writing past it fails, as on a full disk
    try:
        with pytest.raises(CheckpointError, match="cannot be written") as caught:
            save_orbax(tmp_path / "out", {"lm_head": PARAMETERS["lm_head"]}, CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(CheckpointError, match="needs up to .* bytes, 1000 are free"):
        save_orbax(tmp_path / "out", PARAMETERS, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path):
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        save_orbax(target, PARAMETERS, CONFIG)
    assert list(target.iterdir()) == []


def test_a_target_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_orbax(tmp_path / "file" / "out", PARAMETERS, CONFIG)
