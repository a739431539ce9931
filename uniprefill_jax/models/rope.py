"""Rotary position embeddings: default, linear and llama3 length scaling, whole or partial heads.

Angles are float32 products of position and inverse frequency, as the models were trained with.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Inverse frequency of each turned pair, float32 [rotary_dim / 2], length scaling applied."""
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    # Far from the start one unit in the last place turns an angle by milliradians: the power is rounded to float32
    # first and inverted there, as the models were trained.
    powers = np.power(np.float64(rope.theta), exponent.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / powers
    if rope.scaling == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Divide slow frequencies by the factor, keep fast ones, blend between (Llama 3.1's `rope_type: llama3`)."""
    single = np.float32
    wavelengths = single(2 * np.pi) / frequencies
    slow = single(rope.original_max_position / rope.low_frequency_factor)
    fast = single(rope.original_max_position / rope.high_frequency_factor)
    scaled = np.where(wavelengths > slow, frequencies / single(rope.factor), frequencies)
    blend = (single(rope.original_max_position) / wavelengths - single(rope.low_frequency_factor)) / single(
        rope.high_frequency_factor - rope.low_frequency_factor
    )
    blended = (single(1) - blend) * scaled / single(rope.factor) + blend * scaled
    between = (wavelengths >= fast) & (wavelengths <= slow)
    return np.where(between, blended, scaled).astype(np.float32)


def rope_table(
    rope: RopeConfig, positions: Int32[Array, " T"]
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosines and sines of every position, float32."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(rope))[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "T heads head_dim"], table: tuple[Float[Array, "T half"], Float[Array, "T half"]]
) -> Float[Array, "T heads head_dim"]:
    """Turn the first 2 * half dimensions of every head (first half paired with second half)."""
    cosine, sine = (part[:, None, :] for part in table)
    half = cosine.shape[-1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
