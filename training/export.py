"""Parameters become a Hugging Face folder, by the same declarations that read one."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from training.architecture import make_model
from training.vocabulary import save_tokenizer
from uniprefill_jax.models.parameters import ParameterSpec, parameter_specs


def checkpoint_tensors(config: dict[str, Any], parameters: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Tensors by their names in a checkpoint, bfloat16: the inverse of `checkpoints_convert.load_parameters`."""
    tensors = {}
    for path, spec in parameter_specs(make_model(config)).items():
        tensors |= _tensors_of(spec, np.asarray(parameters[path]).astype(ml_dtypes.bfloat16))
    return tensors


def save_checkpoint(
    folder: Path, config: dict[str, Any], parameters: dict[str, jax.Array], tokenizer: Tokenizer
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files. A file is replaced only once it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "model.safetensors.unfinished"
    save_file(checkpoint_tensors(config, parameters), unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder, config["max_position_embeddings"])


def _tensors_of(spec: ParameterSpec, value: np.ndarray) -> dict[str, np.ndarray]:
    layers = (None,) if spec.layers is None else spec.layers
    experts = (None,) if spec.experts is None else range(spec.experts)
    stacked = value.reshape(-1, *spec.shape)
    back = np.argsort(spec.permutation)
    return {
        spec.checkpoint.format(layer=layer, expert=expert): np.ascontiguousarray(
            one.transpose(back).reshape(spec.file_shape)
        )
        for (layer, expert), one in zip(itertools.product(layers, experts), stacked, strict=True)
    }
