"""Norms and residual sums of rows in plain jnp: the truth that the kernel is held to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, eps: float, zero_centred: bool
) -> Float[Array, "*rows D"]:
    """x / rms(x) times a weight (plus one where it is `zero_centred`), in float32, in the type of `x`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if zero_centred:
        return (wide * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    # Llama checkpoints were trained with the product taken in the activations' type.
    return wide.astype(x.dtype) * weight.astype(x.dtype)


def norm_rows_reference(
    x: Float[Array, "T D"],
    weights: Float[Array, "layers D"],
    layer: Int32[Array, ""],
    count: Int32[Array, ""],
    *,
    eps: float,
    zero_centred: bool,
) -> Float[Array, "T D"]:
    """The norm of every row; `count` is not needed here."""
    del count
    return norm(x, weights[layer], eps=eps, zero_centred=zero_centred)


def add_rows_reference(
    x: Float[Array, "T D"],
    delta: Float[Array, "T D"],
    weights: Float[Array, "layers D"] | None,
    layer: Int32[Array, ""],
    count: Int32[Array, ""],
    *,
    eps: float,
    zero_centred: bool,
) -> Float[Array, "T D"]:
    """x + delta, or x + norm(delta) with a weight; `count` is not needed here."""
    del count
    return x + (delta if weights is None else norm(delta, weights[layer], eps=eps, zero_centred=zero_centred))
