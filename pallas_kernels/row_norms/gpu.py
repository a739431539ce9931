"""Norms and residual sums on Hopper GPUs (Mosaic GPU): one warpgroup a row, no work on rows past the count.

XLA's fusions do the same work over all rows, padding included: after a few drops that is most of them, and a tenth of a
hybrid model's prefill. Rows are read straight into registers, as wide as the memory bus likes; so many programs share a
multiprocessor that one's loads hide behind the others' sums.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.hopper import MULTIPROCESSORS

PROGRAMS_PER_MULTIPROCESSOR = 8
THREADS = 128  # of a warpgroup
COUNT, LAYER = 0, 1  # places among the numbers that the kernel reads
WIDEST = 8192  # columns: what the registers of a warpgroup hold, two rows at a time


def unsupported(width: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take rows of this width and type, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"dtype is {dtype}; it takes bfloat16"
    if width % (2 * THREADS) or not 0 < width <= WIDEST:
        return f"rows have {width} columns; it takes multiples of {2 * THREADS} up to {WIDEST}"
    return None


def norm_rows_mosaic_gpu(
    x: Float[Array, "T D"],
    weights: Float[Array, "layers D"],
    layer: Int32[Array, ""],
    count: Int32[Array, ""],
    *,
    eps: float,
    zero_centred: bool,
) -> Float[Array, "T D"]:
    """The norm of rows [0, count); see `norm_rows`.

    Raises:
        ValueError: a width or dtype that the kernel does not take.
    """
    _check(x)

    def function(row, weight):
        return _norm(row, weight, eps, zero_centred)

    return _on_rows(function, (x,), (weights,), layer, count)


def add_rows_mosaic_gpu(
    x: Float[Array, "T D"],
    delta: Float[Array, "T D"],
    weights: Float[Array, "layers D"] | None,
    layer: Int32[Array, ""],
    count: Int32[Array, ""],
    *,
    eps: float,
    zero_centred: bool,
) -> Float[Array, "T D"]:
    """x + delta or x + norm(delta) of rows [0, count); see `add_rows`.

    Raises:
        ValueError: a width or dtype that the kernel does not take.
    """
    _check(x)
    if weights is None:
        return _on_rows(lambda row, delta: row + delta, (x, delta), (), layer, count)

    def function(row, delta, weight):
        normed = _norm(delta, weight, eps, zero_centred).astype(jnp.bfloat16)
        return row + normed.astype(jnp.float32)

    return _on_rows(function, (x, delta), (weights,), layer, count)


def _check(x: jax.Array) -> None:
    reason = unsupported(x.shape[1], x.dtype)
    if reason is not None:
        raise ValueError(f"row_norms: backend 'mosaic_gpu' cannot run this: {reason}; use backend='reference'")


def _norm(row, weight, eps, zero_centred):
    """Of one float32 row."""
    mean = jnp.sum(row * row) * (1.0 / row.shape[0])
    row = row * lax.rsqrt(mean + eps)
    if zero_centred:
        return row * (1.0 + weight)
    return row.astype(jnp.bfloat16).astype(jnp.float32) * weight


def _on_rows(
    function: Callable[..., jax.Array],
    arrays: tuple[jax.Array, ...],
    stacks: tuple[jax.Array, ...],
    layer: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """function(row of each array, row `layer` of each stack), float32, for rows [0, count); others are not written."""
    rows, width = arrays[0].shape
    programs = min(rows, MULTIPROCESSORS * PROGRAMS_PER_MULTIPROCESSOR)

    def body(*refs):
        *sources, numbers_gmem, out_gmem = refs
        array_refs, stack_refs = sources[: len(arrays)], sources[len(arrays) :]
        program = lax.axis_index("program")
        mine = lax.div(numbers_gmem[COUNT] - program + (programs - 1), programs)
        constants = [ref[numbers_gmem[LAYER]].astype(jnp.float32) for ref in stack_refs]

        def one(index, _):
            row = program + index * programs
            values = [ref[row].astype(jnp.float32) for ref in array_refs]
            out_gmem[row] = function(*values, *constants).astype(out_gmem.dtype)
            return ()

        lax.fori_loop(0, mine, one, ())

    return mgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), arrays[0].dtype),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=mgpu.CompilerParams(approx_math=True),
    )(*arrays, *stacks, jnp.stack([jnp.minimum(count, rows), layer]))
