"""Converted checkpoints: an Orbax folder of stacked parameters, with config, tokenizer and a list of files beside it.

folder/
  config.json                 as Hugging Face spells it
  uniprefill.json             format number, parameters, and every parameter file with its size and checksum
  tokenizer.json, ...         if the source has a tokenizer
  parameters/                 written by Orbax: arrays by parameter path, in this library's layout
"""

import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from checkpoints_convert.source import (
    CheckpointSource,
    Index,
    TensorInfo,
    name_some,
    normalise_index,
    one_line,
    read_json,
)
from uniprefill_jax.errors import CheckpointError

if TYPE_CHECKING:  # slow to import, so only the functions that need it do
    import orbax.checkpoint as ocp

MANIFEST_NAME = "uniprefill.json"
_FORMAT = 1
_PARAMETERS = "parameters"
_AGAIN = "convert the model again"


class OrbaxSource(CheckpointSource):
    """A folder that `save_orbax` wrote. `tensors` are parameters by path, stacked, in the dtype they were saved in."""

    kind: Literal["orbax"] = "orbax"

    def __init__(self, path: Path):
        """Open a converted folder: config, manifest, and the presence and size of every parameter file are checked."""
        self.path = path
        manifest = read_json(path / MANIFEST_NAME)
        if manifest.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path / MANIFEST_NAME}: format is {manifest.get('format')!r}, this version reads {_FORMAT}; {_AGAIN}"
            )
        try:
            self._files = {name: (int(size), int(crc)) for name, (size, crc) in manifest["files"].items()}
            self.tensors: dict[str, TensorInfo] = {
                name: TensorInfo(tuple(entry["shape"]), np.dtype(jnp.dtype(entry["dtype"])))
                for name, entry in manifest["parameters"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path / MANIFEST_NAME}: is damaged ({one_line(error)}); {_AGAIN}") from None
        self._check_files()
        self.config: dict[str, Any] = read_json(path / "config.json")
        self._verified = False

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a whole parameter and return the part that `index` selects."""
        import orbax.checkpoint as ocp

        return self._restore(name, ocp.RestoreArgs(restore_type=np.ndarray))[
            normalise_index(index, self.tensors[name].shape)
        ]

    def restore(self, name: str, dtype: np.dtype, placement: Sharding | None) -> jax.Array:
        """A parameter as a jax array, read straight onto `placement`; bit-identical if `dtype` is the stored one."""
        import orbax.checkpoint as ocp

        if placement is None:
            array = jax.device_put(self.read(name))
        else:
            array = self._restore(name, ocp.ArrayRestoreArgs(sharding=placement))
        return array if array.dtype == dtype else array.astype(dtype)

    def _restore(self, name: str, arguments: "ocp.RestoreArgs") -> Any:
        import orbax.checkpoint as ocp

        self._verify()
        with (
            _damage_named(self.path),
            _quiet_threads(),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            restored = checkpointer.restore(
                self.path.absolute() / _PARAMETERS,
                args=ocp.args.PyTreeRestore({name: 0}, restore_args={name: arguments}, partial_restore=True),
            )[name]
        info = self.tensors[name]
        if not isinstance(restored, np.ndarray | jax.Array):  # Orbax gives back what it did not find
            raise CheckpointError(f"{self.path / _PARAMETERS}: has no array {name}, {MANIFEST_NAME} says so; {_AGAIN}")
        if restored.shape != info.shape or restored.dtype != info.dtype:
            raise CheckpointError(
                f"{self.path}: {name} is {restored.dtype} {list(restored.shape)}, "
                f"{MANIFEST_NAME} says {info.dtype} {list(info.shape)}; {_AGAIN}"
            )
        return restored

    def _check_files(self) -> None:
        """The files under parameters/ are those of the manifest, each of its size."""
        folder = self.path / _PARAMETERS
        present = {file.relative_to(folder).as_posix(): file.stat().st_size for file in _files(folder)}
        missing = [name for name in self._files if name not in present]
        surplus = [name for name in present if name not in self._files]
        if missing or surplus:
            what, names = (
                ("lacks files", missing) if missing else ("holds files that the conversion did not write", surplus)
            )
            raise CheckpointError(f"{folder}: {what} ({name_some(names)}); {_AGAIN}")
        for name, (size, _) in self._files.items():
            if present[name] != size:
                raise CheckpointError(f"{folder / name}: {present[name]} bytes, expected {size}; {_AGAIN}")

    def _verify(self) -> None:
        """Compare checksums, once, before the first read: Orbax itself does not notice every changed byte."""
        if self._verified:
            return
        folder = self.path / _PARAMETERS
        for name, (_, checksum) in self._files.items():
            if _checksum(folder / name) != checksum:
                raise CheckpointError(f"{folder / name}: contents changed since the conversion; {_AGAIN}")
        self._verified = True


class SavesFiles(Protocol):
    """A tokenizer, as far as a checkpoint needs one."""

    def save(self, folder: Path) -> None:
        """Write files into an existing folder."""


def refuse_existing(dst: Path | str) -> None:
    """CheckpointError if there is something at `dst` already: converting never overwrites."""
    if Path(dst).exists() or Path(dst).is_symlink():
        raise CheckpointError(f"{dst}: exists already; remove it or choose another folder")


def save_orbax(
    dst: Path | str,
    parameters: Mapping[str, jax.Array],
    config: Mapping[str, Any],
    tokenizer: SavesFiles | None = None,
) -> None:
    """Write a converted checkpoint; nothing is left under `dst` or beside it if anything fails.

    Args:
        dst: a folder that does not exist yet.
        parameters: arrays by parameter path; they are stored in their own dtype.
        config: contents of config.json.
        tokenizer: its files are put beside the parameters.

    Raises CheckpointError if `dst` exists or cannot be written.
    """
    import orbax.checkpoint as ocp

    refuse_existing(dst)
    dst = Path(dst).absolute()
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        needed, free = sum(array.nbytes for array in parameters.values()), shutil.disk_usage(dst.parent).free
        if needed > free:  # before the first byte: Orbax's writers do not stop cleanly on a full disk
            raise CheckpointError(f"{dst}: needs up to {needed} bytes, {free} are free; choose another folder")
        working = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
    except OSError as error:
        raise CheckpointError(f"{dst}: cannot be written ({one_line(error)}); choose another folder") from None
    try:
        with _quiet_threads(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(working / _PARAMETERS, args=ocp.args.PyTreeSave(dict(parameters)))
        if tokenizer is not None:
            tokenizer.save(working)
        _write_json(working / "config.json", config)
        _write_json(working / MANIFEST_NAME, _manifest(working / _PARAMETERS, parameters))
        working.chmod(0o755)  # mkdtemp makes it private
        os.rename(working, dst)
    except (OSError, ValueError) as error:  # tensorstore reports a full disk as ValueError
        reason = "no space left on the device" if "No space left" in str(error) else one_line(error)
        raise CheckpointError(f"{dst}: cannot be written ({reason}); choose another folder") from None
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _manifest(folder: Path, parameters: Mapping[str, jax.Array]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "parameters": {
            name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in parameters.items()
        },
        "files": {
            file.relative_to(folder).as_posix(): [file.stat().st_size, _checksum(file)] for file in _files(folder)
        },
    }


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Orbax's threads log a traceback of every exception that they then hand on."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Orbax and tensorstore report damage as many kinds of exception: all become one line."""
    try:
        yield
    except (OSError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path / _PARAMETERS}: cannot be restored ({one_line(error)}); {_AGAIN}") from None
