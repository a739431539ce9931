"""The GGUF container: metadata and tensor table, parsed strictly; rows of tensors dequantised on demand.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The parser is our
own because `gguf.GGUFReader` builds a memory map per string, which takes half a minute for a vocabulary of 262,144, and
follows a damaged file into numpy errors; block formats and dequantisation are the `gguf` package's.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints_convert.source import one_line
from uniprefill_jax.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_CHUNK_BYTES = 1 << 18  # of quantised data at a time: the dequantiser's temporaries then stay in cache


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored; `shape` is in numpy's order (outermost axis first)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Number of rows: a row runs along the last axis, which is the one that is quantised in blocks."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """An opened GGUF file: `metadata` by key, `tensors` by GGUF name."""

    def __init__(self, path: Path):
        """Parse the whole header; CheckpointError if the file is not GGUF, cut short, or inconsistent."""
        self.path = path
        try:
            with path.open("rb") as stream:
                self._size = stream.seek(0, 2)
                if self._size < 24:
                    raise CheckpointError(f"{path}: {self._size} bytes, too short for a GGUF file; fetch it again")
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from None
        cursor = _Cursor(path, self._data, self._size)
        self.metadata, self.tensors = _read_header(cursor)

    def read_rows(self, name: str, rows: np.ndarray | slice) -> np.ndarray:
        """Dequantise the chosen rows of a tensor to float32 [rows, last axis]."""
        tensor = self.tensors[name]
        size = self.path.stat().st_size
        if size != self._size:  # reading a map of a file that shrank would kill the process
            raise CheckpointError(
                f"{self.path}: {size} bytes, but it had {self._size} when it was opened; load it again"
            )
        stored = np.frombuffer(self._data, np.uint8, tensor.rows * tensor.row_bytes, tensor.offset)
        stored = stored.reshape(tensor.rows, tensor.row_bytes)
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(tensor.rows))
        result = np.empty((len(rows), tensor.shape[-1]), np.float32)
        step = max(1, _CHUNK_BYTES // tensor.row_bytes)
        for start in range(0, len(rows), step):
            result[start : start + step] = dequantize(stored[rows[start : start + step]], tensor.kind)
        return result


class _Cursor:
    """Reads values one after another and refuses to run past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self.path, self.data, self.size, self.position = path, data, size, 0

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}; fetch the file again")

    def take(self, count: int) -> int:
        """Advance by `count` bytes; returns where they start."""
        start = self.position
        if count > self.size - start:
            raise self.fail(f"GGUF file is cut short: its header runs past the end at byte {self.size}")
        self.position = start + count
        return start

    def number(self, layout: str) -> int:
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.number("<Q")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"GGUF header is corrupt: text at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.number("<I"), self.number("<Q")
            if element == _STRING:
                self.need(count * 8)
                return [self.string() for _ in range(count)]
            if element not in _SCALARS:
                raise self.fail(f"GGUF header is corrupt: unknown array element type {element} at byte {self.position}")
            dtype = _SCALARS[element]
            return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).tolist()
        if kind not in _SCALARS:
            raise self.fail(f"GGUF header is corrupt: unknown value type {kind} at byte {self.position}")
        dtype = _SCALARS[kind]
        return np.frombuffer(self.data, dtype, 1, self.take(dtype.itemsize)).item()

    def need(self, count: int) -> None:
        """Check that `count` more bytes exist, before believing a length field."""
        if count > self.size - self.position:
            raise self.fail(f"GGUF file is cut short: its header runs past the end at byte {self.size}")


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path}: starts with {magic!r}, not {MAGIC!r}; this is not a GGUF file")
    cursor.take(4)
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{cursor.path}: GGUF version {version}; little-endian versions 2 and 3 are supported, convert it again"
        )
    tensor_count, key_count = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"GGUF header is corrupt: key {key} appears twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    tensors: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        name, tensor = _read_tensor_entry(cursor)
        if name in tensors:
            raise cursor.fail(f"GGUF header is corrupt: tensor {name} appears twice")
        tensors[name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.fail(f"GGUF header is corrupt: general.alignment is {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    placed = {
        name: GgufTensor(tensor.shape, tensor.kind, data_start + tensor.offset, tensor.row_bytes)
        for name, tensor in tensors.items()
    }
    for name, tensor in placed.items():
        end = tensor.offset + tensor.rows * tensor.row_bytes
        if end > cursor.size:
            raise cursor.fail(f"GGUF file is cut short: {cursor.size} bytes, but tensor {name} ends at byte {end}")
    return metadata, placed


def _read_tensor_entry(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """One entry of the tensor table; its offset still counts from the start of the data."""
    name = cursor.string()
    axes = cursor.number("<I")
    if not 1 <= axes <= 4:
        raise cursor.fail(f"GGUF header is corrupt: tensor {name} has {axes} axes")
    shape = tuple(cursor.number("<Q") for _ in range(axes))[::-1]
    code, offset = cursor.number("<I"), cursor.number("<Q")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has storage type {code}, which the gguf package does not know; upgrade gguf"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or 0 in shape:
        raise cursor.fail(f"GGUF header is corrupt: tensor {name} of shape {shape} is not whole blocks of {block}")
    return name, GgufTensor(shape, kind, offset, shape[-1] // block * block_bytes)
