"""Safetensors checkpoints, single file or sharded with an index: headers are checked on opening, slices read on demand.

Format, from https://huggingface.co/docs/safetensors: 8-byte header length, JSON header, one buffer without gaps.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from checkpoints_convert.names import text_model_name
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

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD_NAME = re.compile(r".+-(\d{5})-of-(\d{5})\.safetensors")
_MAX_HEADER = 100_000_000  # the format's own limit
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


@dataclass(frozen=True)
class _Location:
    """Where a tensor's bytes lie: the file, the first byte, and the size the file had when its header was checked."""

    file: Path
    offset: int
    file_size: int


class SafetensorsSource(CheckpointSource):
    """A checkpoint in safetensors files. Names of text models nested in multimodal checkpoints are flattened."""

    kind: Literal["safetensors"] = "safetensors"

    def __init__(self, path: Path):
        """Open a folder, or one .safetensors file with config.json beside it; CheckpointError if anything is amiss."""
        self.path = path
        folder = path if path.is_dir() else path.parent
        files, weight_map = _shards(path) if path.is_dir() else ([path], None)
        self.tensors: dict[str, TensorInfo] = {}
        self._locations: dict[str, _Location] = {}
        homes: dict[str, str] = {}
        for file in files:
            for name, info, location in _read_header(file):
                if name in homes:
                    raise CheckpointError(
                        f"{folder}: tensor {name} is in both {homes[name]} and {file.name}; keep one of the files"
                    )
                homes[name] = file.name
                plain = text_model_name(name)
                if plain in self.tensors:
                    raise CheckpointError(
                        f"{file}: tensors named {name} and {plain} are the same one; remove one of them"
                    )
                self.tensors[plain] = info
                self._locations[plain] = location
        if weight_map is not None:
            _check_weight_map(folder, weight_map, homes)
        self.config: dict[str, Any] = read_json(folder / "config.json")

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a slice through a memory map: only the pages that hold it are fetched from disk."""
        info, location = self.tensors[name], self._locations[name]
        explicit = normalise_index(index, info.shape)
        if math.prod(part.stop - part.start for part in explicit) == 0:
            return np.empty([part.stop - part.start for part in explicit], info.dtype)
        try:
            size = location.file.stat().st_size
            if size != location.file_size:  # a map of a file that shrank would kill the process
                raise CheckpointError(
                    f"{location.file}: {size} bytes, but it had {location.file_size} when it was opened; load it again"
                )
            view = np.memmap(location.file, info.dtype, mode="r", offset=location.offset, shape=info.shape or (1,))
        except OSError as error:
            raise CheckpointError(f"{location.file}: cannot be read ({one_line(error)})") from None
        return np.array(view[explicit] if info.shape else view[0], subok=False)


def _shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files that make up the checkpoint in a folder, and the index's tensor -> file map if there is one."""
    present = sorted(file.name for file in folder.glob("*.safetensors"))
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        numbered = [name for name in present if _SHARD_NAME.fullmatch(name)]
        if SINGLE_NAME in present and not numbered:
            return [folder / SINGLE_NAME], None
        if numbered:
            raise CheckpointError(f"{folder}: holds shard {numbered[0]} but no {INDEX_NAME}; fetch the index file")
        if len(present) != 1:
            raise CheckpointError(
                f"{folder}: holds {len(present)} .safetensors files ({name_some(present)}) and no {INDEX_NAME}; "
                "keep one file or fetch the index"
            )
        return [folder / present[0]], None
    if SINGLE_NAME in present:
        raise CheckpointError(f"{folder}: holds both {SINGLE_NAME} and {INDEX_NAME}; remove one of the two")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: has no weight_map; fetch the index again")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index_path}: puts tensor {tensor} in {shard!r}, which is not a file name")
    named = sorted(set(weight_map.values()))
    missing = [name for name in named if name not in present]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(named)} shards named by {INDEX_NAME} are missing "
            f"({name_some(missing)}); fetch them"
        )
    surplus = [name for name in present if _SHARD_NAME.fullmatch(name) and name not in named]
    if surplus:
        raise CheckpointError(
            f"{folder}: {INDEX_NAME} names {len(named)} shards, the folder holds {len(surplus)} more "
            f"({name_some(surplus)}); remove them or fetch the right index"
        )
    for name in named:
        match = _SHARD_NAME.fullmatch(name)
        if match and int(match[2]) != len(named):
            raise CheckpointError(
                f"{index_path}: names {len(named)} shards, but {name} says {int(match[2])}; fetch the index again"
            )
    return [folder / name for name in named], weight_map


def _check_weight_map(folder: Path, weight_map: dict[str, str], homes: dict[str, str]) -> None:
    """Index and shard headers must agree tensor by tensor."""
    absent = [name for name in weight_map if name not in homes]
    if absent:
        raise CheckpointError(
            f"{folder / weight_map[absent[0]]}: lacks tensors that {INDEX_NAME} puts there ({name_some(absent)}); "
            "fetch the shard again"
        )
    unlisted = [name for name in homes if name not in weight_map]
    if unlisted:
        raise CheckpointError(
            f"{folder / homes[unlisted[0]]}: holds tensors that {INDEX_NAME} does not list ({name_some(unlisted)}); "
            "fetch index and shards of one version"
        )
    for name, file in homes.items():
        if weight_map[name] != file:
            raise CheckpointError(
                f"{folder}: tensor {name} is in {file}, but {INDEX_NAME} says {weight_map[name]}; fetch the index again"
            )


def _read_header(file: Path) -> list[tuple[str, TensorInfo, _Location]]:
    """Parse and check one file's header against the file's size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length < 2:
                raise CheckpointError(f"{file}: {size} bytes, not a safetensors file; fetch it again")
            opening = stream.read(1)
            if opening != b"{":
                raise CheckpointError(
                    f"{file}: does not start like a safetensors file (byte 8 is {opening!r}, expected '{{'); "
                    "convert or fetch the weights again"
                )
            if length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{file}: header of {length} bytes in a file of {size}; it is cut short or corrupt, fetch it again"
                )
            header = (opening + stream.read(length - 1)).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors ({one_line(error)}); fetch it again") from None
    try:
        entries = json.loads(header, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: safetensors header is corrupt ({one_line(error)}); fetch it again") from None
    entries.pop("__metadata__", None)
    found, end = [], 0
    data_start = 8 + length
    parsed = [(*_parse_entry(file, name, entry), name) for name, entry in entries.items()]
    for start, stop, info, name in sorted(parsed, key=lambda item: item[:2]):
        if start != end:
            raise CheckpointError(
                f"{file}: tensor {name} starts at byte {start}, expected {end}; the header is corrupt, fetch it again"
            )
        end = stop
        found.append((name, info, _Location(file, data_start + start, size)))
    if data_start + end != size:
        state = "cut short" if data_start + end > size else "longer than its header says"
        raise CheckpointError(f"{file}: {state}: {size} bytes, the header describes {data_start + end}; fetch it again")
    return found


def _parse_entry(file: Path, name: str, entry: Any) -> tuple[int, int, TensorInfo]:
    """One header entry: first and last byte in the buffer, and the tensor's shape and dtype."""
    try:
        dtype_name, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError("sizes must be integers of at least 0")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: header entry of {name} is corrupt ({one_line(error)}); fetch it again"
        ) from None
    if dtype_name not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {dtype_name!r}; supported are {', '.join(_DTYPES)}")
    info = TensorInfo(tuple(shape), _DTYPES[dtype_name])
    if stop - start != info.nbytes:
        raise CheckpointError(
            f"{file}: tensor {name} of shape {info.shape} and dtype {dtype_name} needs {info.nbytes} bytes, "
            f"the header gives it {stop - start}; fetch the file again"
        )
    return start, stop, info


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is described twice")
    return keys
