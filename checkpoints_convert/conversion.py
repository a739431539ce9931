"""From any checkpoint to an Orbax folder in this library's layout."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.load import load_parameters
from checkpoints_convert.opening import open_checkpoint
from checkpoints_convert.orbax_store import refuse_existing, save_orbax
from uniprefill_jax.models.causal_lm import CausalLM, ignored_tensors
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import parameter_specs
from uniprefill_jax.tokenizer import load_tokenizer


def convert(
    src: Path | str,
    dst: Path | str,
    dtype: np.typing.DTypeLike,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read a checkpoint and write it as an Orbax folder with config and tokenizer; loading that is bit-identical.

    Args:
        src: what `open_checkpoint` takes.
        dst: a folder that does not exist yet. If anything fails, it still does not exist afterwards.
        dtype: of the stored arrays.
        progress: called with bytes read so far and in all.

    Raises CheckpointError or ConfigError.
    """
    refuse_existing(dst)
    source = open_checkpoint(src)
    config = read_model_config(source.config)
    model = CausalLM(config, jnp.dtype(dtype))
    tokenizer = load_tokenizer(source)
    parameters = load_parameters(
        source, parameter_specs(model), dtype=dtype, ignore=ignored_tensors(config), progress=progress
    )
    save_orbax(dst, parameters, source.config, tokenizer)
