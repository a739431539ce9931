"""Norms and residual sums of rows: the entry points that pick a backend."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.platform import kernels_of
from pallas_kernels.row_norms import gpu, reference

Backends = Literal["reference", "mosaic_gpu"]
Backend = Literal["auto", "reference", "mosaic_gpu"]

_NORM = {"reference": reference.norm_rows_reference, "mosaic_gpu": gpu.norm_rows_mosaic_gpu}
_ADD = {"reference": reference.add_rows_reference, "mosaic_gpu": gpu.add_rows_mosaic_gpu}


def choose_backend(*, width: int = 4096, dtype: str = "bfloat16", platform: str | None = None) -> Backends:
    """Name the backend that `backend="auto"` takes for rows of `width` (default platform: what jax runs on).

    The kernel on Hopper GPUs. Elsewhere the reference, which XLA fuses with its neighbours: TPUs follow the kept rows
    by a ladder of lengths, so that there is no padding to leave out.
    """
    on_hopper = kernels_of(platform) == "mosaic_gpu"
    return "mosaic_gpu" if on_hopper and gpu.unsupported(width, jnp.dtype(dtype)) is None else "reference"


def norm_rows(
    x: Float[Array, "T D"],
    weight: Float[Array, " D"] | Float[Array, "layers D"],
    count: Int32[Array, ""] | int,
    *,
    layer: Int32[Array, ""] | int = 0,
    eps: float,
    zero_centred: bool = False,
    backend: Backend = "auto",
) -> Float[Array, "T D"]:
    """x / rms(x) times `weight`, or times 1 + weight where it is `zero_centred`, row by row.

    Args:
        x: hidden states; rows from `count` on are padding.
        weight: one number per column; or a stack of such, of which that of `layer` counts. On Hopper it is read where
            it lies: cut out beforehand it would be at another address in every layer, and the launches of a loop over
            layers could not be recorded once for all of them.
        count: number of real rows; traced.
        layer: traced as well.
        eps: added to the mean square.
        backend: "auto" is `choose_backend`; one that is named is used or refused, never replaced.

    Returns:
        Rows [0, count), in the type of `x`; what the others hold is not defined.

    Raises:
        ValueError: shapes that do not fit together, or that the named backend cannot take.
    """
    _check(x, weight)
    count, layer = jnp.asarray(count, jnp.int32), jnp.asarray(layer, jnp.int32)
    stack = weight if weight.ndim == 2 else weight[None]
    return _NORM[_chosen(x, backend)](x, stack, layer, count, eps=eps, zero_centred=zero_centred)


def add_rows(
    x: Float[Array, "T D"],
    delta: Float[Array, "T D"],
    count: Int32[Array, ""] | int,
    *,
    weight: Float[Array, " D"] | Float[Array, "layers D"] | None = None,
    layer: Int32[Array, ""] | int = 0,
    eps: float = 0.0,
    zero_centred: bool = False,
    backend: Backend = "auto",
) -> Float[Array, "T D"]:
    """x + delta, or with a `weight` x + norm(delta) (see `norm_rows`), row by row.

    Returns:
        Rows [0, count), in the type of `x`; what the others hold is not defined.

    Raises:
        ValueError: shapes that do not fit together, or that the named backend cannot take.
    """
    _check(x, weight)
    if delta.shape != x.shape or delta.dtype != x.dtype:
        raise ValueError(f"row_norms: delta is {delta.dtype}{delta.shape} and x {x.dtype}{x.shape}; they must agree")
    count, layer = jnp.asarray(count, jnp.int32), jnp.asarray(layer, jnp.int32)
    stack = weight[None] if weight is not None and weight.ndim == 1 else weight
    return _ADD[_chosen(x, backend)](x, delta, stack, layer, count, eps=eps, zero_centred=zero_centred)


def _chosen(x: Array, backend: Backend) -> Backends:
    if backend == "auto":
        return choose_backend(width=x.shape[1], dtype=str(x.dtype))
    if backend not in _NORM:
        raise ValueError(f"row_norms: backend is {backend!r}; use 'auto', {', '.join(map(repr, _NORM))}")
    return backend


def _check(x: Array, weight: Array | None) -> None:
    if x.ndim != 2:
        raise ValueError(f"row_norms: x has shape {x.shape}; it must be [T, D]")
    if weight is not None and (weight.ndim not in (1, 2) or weight.shape[-1] != x.shape[1]):
        raise ValueError(f"row_norms: weight has shape {weight.shape} and rows {x.shape[1]} columns; they must agree")
