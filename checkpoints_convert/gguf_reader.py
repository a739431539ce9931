"""GGUF checkpoints as Hugging Face ones: names mapped, llama's q and k rows put in order, gemma's norms without +1."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from checkpoints_convert.gguf_config import synthesise_config
from checkpoints_convert.gguf_file import GgufFile
from checkpoints_convert.names import GGUF_ARCHITECTURES, gguf_to_hugging_face
from checkpoints_convert.source import CheckpointSource, Index, TensorInfo, name_some, normalise_index
from uniprefill_jax.errors import CheckpointError

_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource(CheckpointSource):
    """One GGUF file. Tensors are float32; only the rows that are asked for are dequantised.

    Attributes:
        metadata: the file's own metadata, from which the tokenizer is built.
    """

    kind: Literal["gguf"] = "gguf"

    def __init__(self, path: Path):
        """Open a .gguf file; CheckpointError if it is damaged or its architecture is not supported."""
        self.path = path
        self._file = GgufFile(path)
        self.metadata: dict[str, Any] = self._file.metadata
        self.architecture = self.metadata.get("general.architecture")
        if self.architecture not in GGUF_ARCHITECTURES:
            raise CheckpointError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; "
                f"supported are {', '.join(GGUF_ARCHITECTURES)}"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path}: is one of {self.metadata['split.count']} parts; join them with llama-gguf-split --merge"
            )
        self._gguf_names = self._map_names()
        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(self._file.tensors[stored].shape, np.dtype(np.float32))
            for name, stored in self._gguf_names.items()
        }
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError(f"{path}: has no token_embd.weight; the file does not hold a whole model")
        factors = self._file.read_rows(_ROPE_FACTORS, slice(None))[0] if _ROPE_FACTORS in self._file.tensors else None
        self.config: dict[str, Any] = synthesise_config(
            path, self.architecture, self.metadata, embedding.shape[0], set(self.tensors), factors
        )

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor, dequantised to float32; of a leading-axis slice only those rows are touched."""
        shape = self.tensors[name].shape
        explicit = normalise_index(index, shape)
        stored = self._gguf_names[name]
        if len(shape) == 1:
            values = self._file.read_rows(stored, slice(None))[0]
            if self.architecture == "gemma3" and name.endswith("norm.weight"):
                values = values - np.float32(1.0)
            order = self._row_order(name)
            return (values if order is None else values[order])[explicit]
        rows: np.ndarray | slice = explicit[0]
        order = self._row_order(name)
        if order is not None:
            rows = order[explicit[0]]
        values = self._file.read_rows(stored, rows)
        return np.ascontiguousarray(values[(slice(None), *explicit[1:])])

    def _map_names(self) -> dict[str, str]:
        """Hugging Face name -> GGUF name for every tensor; an unknown tensor is an error."""
        mapped, unknown = {}, []
        for stored, tensor in self._file.tensors.items():
            if stored == _ROPE_FACTORS and self.architecture == "llama":
                continue
            name = gguf_to_hugging_face(str(self.architecture), stored)
            if name is None or len(tensor.shape) > 2:
                unknown.append(stored)
            else:
                mapped[name] = stored
        if unknown:
            raise CheckpointError(
                f"{self.path}: tensors that a {self.architecture} model does not have ({name_some(unknown)}); "
                "the file is of another model"
            )
        return mapped

    def _row_order(self, name: str) -> np.ndarray | None:
        """Which stored row each row of llama's q and k comes from.

        llama.cpp rotates neighbouring pairs of dimensions, Hugging Face the two halves of a head: the converter to GGUF
        interleaved the halves, and this undoes it.
        """
        if self.architecture != "llama":
            return None
        if ".self_attn.q_proj." in name:
            heads = self.config["num_attention_heads"]
        elif ".self_attn.k_proj." in name:
            heads = self.config["num_key_value_heads"]
        else:
            return None
        rows = self.tensors[name].shape[0]
        if rows % (2 * heads):
            raise CheckpointError(f"{self.path}: {name} has {rows} rows, not an even number for each of {heads} heads")
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
