"""What every checkpoint format offers: a config, a table of tensors, and reads of slices."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from uniprefill_jax.errors import CheckpointError

Index = tuple[slice, ...]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of one tensor as `CheckpointSource.read` returns it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor once read."""
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointSource(ABC):
    """An opened checkpoint: everything but the tensors' contents has been read and checked.

    Attributes:
        path: the file or folder it was opened from.
        kind: the storage format.
        config: contents of config.json in Hugging Face spelling (synthesised for GGUF).
        tensors: tensor names and layout; Hugging Face names, but parameter paths for Orbax.
    """

    path: Path
    kind: Literal["safetensors", "gguf", "orbax"]
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    @abstractmethod
    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor, or the part of it that `index` (one slice per leading axis, step 1) selects.

        Raises CheckpointError if the file lost bytes since it was opened; KeyError for an unknown name.
        """


def normalise_index(index: Index | None, shape: tuple[int, ...]) -> Index:
    """Explicit start and stop for every axis of `shape`; axes that `index` leaves out are whole."""
    index = index or ()
    if len(index) > len(shape):
        raise IndexError(f"index of {len(index)} axes for a tensor of shape {shape}")
    explicit = []
    for axis, size in enumerate(shape):
        start, stop, step = (index[axis] if axis < len(index) else slice(None)).indices(size)
        if step != 1:
            raise IndexError(f"index step {step} on axis {axis}; only contiguous slices are read")
        explicit.append(slice(start, max(start, stop)))
    return tuple(explicit)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is missing, not JSON, or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; a checkpoint folder needs it, copy it beside the weights"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({one_line(error)}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object; fetch the file again")
    return value


def one_line(error: BaseException, limit: int = 200) -> str:
    """An exception's message with line breaks removed and cut to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def name_some(names: list[str], limit: int = 4) -> str:
    """The first few names and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
