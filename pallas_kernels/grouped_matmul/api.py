"""Grouped matrix products: the entry points that pick a backend."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul import gpu, reference, tiles, tpu
from pallas_kernels.platform import kernels_of

Backends = Literal["reference", "tiles", "xla", "mosaic_gpu", "mosaic_tpu"]
Backend = Literal["auto", "reference", "tiles", "xla", "mosaic_gpu", "mosaic_tpu"]

_PLAIN = {
    "reference": reference.grouped_matmul_reference,
    "tiles": tiles.grouped_matmul_tiles,
    "xla": reference.grouped_matmul_xla,
    "mosaic_gpu": gpu.grouped_matmul_mosaic_gpu,
    "mosaic_tpu": tpu.grouped_matmul_mosaic_tpu,
}
_GATED = {
    "reference": reference.grouped_gated_matmul_reference,
    "tiles": tiles.grouped_gated_matmul_tiles,
    "xla": reference.grouped_gated_matmul_xla,
    "mosaic_gpu": gpu.grouped_gated_matmul_mosaic_gpu,
    "mosaic_tpu": tpu.grouped_gated_matmul_mosaic_tpu,
}


def choose_backend(
    *,
    inner: int = 2048,
    columns: int = 512,
    dtype: str = "bfloat16",
    activation: str | None = None,
    platform: str | None = None,
) -> Backends:
    """Name the backend that `backend="auto"` takes for weights of `inner` x `columns` (default: where jax runs).

    The kernel wherever the machine has one that takes the product. Else on TPUs XLA's ragged product, which is native
    there; everywhere else a loop over tiles, since XLA spells its ragged product out as G copies of the rows.
    """
    kernels = kernels_of(platform)
    if kernels == "reference":
        return "tiles"
    unsupported = gpu.unsupported if kernels == "mosaic_gpu" else tpu.unsupported
    if unsupported(inner, columns, jnp.dtype(dtype), activation) is None:
        return kernels
    return "xla" if kernels == "mosaic_tpu" else "tiles"


def grouped_matmul(
    rows: Float[Array, "M K"],
    weights: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    *,
    first_group: Int32[Array, ""] | int = 0,
    backend: Backend = "auto",
) -> Float[Array, "M N"]:
    """Multiply consecutive groups of rows, each with a matrix of its own; sums in float32.

    Args:
        rows: sorted by group, group 0 first. Rows after the last group are padding and are ignored, whatever they hold.
        weights: the groups' matrices, and any number of others before and after them: a stack [layers * experts, K, N].
        group_sizes: rows of each group, perhaps 0, at most M together; traced, so sizes never recompile.
        first_group: the matrix of group 0; traced, so that one program serves every layer of a stack without a copy of
            the layer's weights. One group of M rows is a plain product with one matrix of a stack.
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

    Returns:
        Products in the dtype of `rows`; zeros in rows that belong to no group.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or that the named backend cannot take.
    """
    _check("grouped_matmul", rows, {"weights": weights}, group_sizes)
    chosen = backend
    if chosen == "auto":
        chosen = choose_backend(inner=rows.shape[1], columns=weights.shape[2], dtype=str(rows.dtype))
    function = _named(_PLAIN, chosen, "grouped_matmul")
    return function(rows, weights, group_sizes, jnp.asarray(first_group, jnp.int32))


def grouped_matmul_each(
    rows: Float[Array, "M K"],
    weights: tuple[Float[Array, "groups K _"], ...],
    group_sizes: Int32[Array, " G"],
    *,
    first_group: Int32[Array, ""] | int = 0,
    backend: Backend = "auto",
) -> tuple[Float[Array, "M _"], ...]:
    """`grouped_matmul` with each of several stacks; on Hopper one kernel for one group, where tiles allow.

    Args:
        rows, group_sizes, first_group, backend: as in `grouped_matmul`.
        weights: matrices of any numbers of columns.

    Raises:
        ValueError: as `grouped_matmul` does.
    """
    chosen = backend
    if chosen == "auto":
        narrowest = min(weight.shape[2] for weight in weights)
        chosen = choose_backend(inner=rows.shape[1], columns=narrowest, dtype=str(rows.dtype))
    columns = tuple(weight.shape[2] for weight in weights)
    if chosen == "mosaic_gpu" and gpu.takes_each(rows, columns, group_sizes):
        _check(
            "grouped_matmul_each", rows, {f"weights[{at}]": weight for at, weight in enumerate(weights)}, group_sizes
        )
        return gpu.grouped_matmul_each_mosaic_gpu(rows, weights, group_sizes, jnp.asarray(first_group, jnp.int32))
    return tuple(
        grouped_matmul(rows, weight, group_sizes, first_group=first_group, backend=chosen) for weight in weights
    )


def grouped_gated_matmul(
    rows: Float[Array, "M K"],
    gate: Float[Array, "groups K N"],
    up: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    *,
    activation: str,
    first_group: Int32[Array, ""] | int = 0,
    backend: Backend = "auto",
) -> Float[Array, "M N"]:
    """`activation(rows @ gate[g]) * (rows @ up[g])` for groups of rows; float32 until the result is rounded.

    Args:
        rows, group_sizes, first_group, backend: as in `grouped_matmul`.
        gate, up: matrices of every group, of one shape; on Hopper the rows are read once for both.
        activation: "silu", "gelu_pytorch_tanh" or "gelu" (which the Hopper kernel does not take).

    Returns:
        Products in the dtype of `rows`; zeros in rows that belong to no group.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or that the named backend cannot take.
    """
    _check("grouped_gated_matmul", rows, {"gate": gate, "up": up}, group_sizes)
    if gate.shape != up.shape:
        raise ValueError(f"grouped_gated_matmul: gate has shape {gate.shape} and up {up.shape}; they must agree")
    if activation not in reference.ACTIVATIONS:
        known = ", ".join(map(repr, reference.ACTIVATIONS))
        raise ValueError(f"grouped_gated_matmul: activation is {activation!r}; use {known}")
    chosen = backend
    if chosen == "auto":
        chosen = choose_backend(
            inner=rows.shape[1], columns=gate.shape[2], dtype=str(rows.dtype), activation=activation
        )
    function = _named(_GATED, chosen, "grouped_gated_matmul")
    return function(rows, gate, up, group_sizes, jnp.asarray(first_group, jnp.int32), activation=activation)


def _named(functions, backend, name):
    if backend not in functions:
        raise ValueError(f"{name}: backend is {backend!r}; use 'auto', {', '.join(map(repr, functions))}")
    return functions[backend]


def _check(name, rows, weights, group_sizes) -> None:
    for label, array in weights.items():
        if rows.ndim != 2 or array.ndim != 3 or group_sizes.ndim != 1:
            raise ValueError(
                f"{name}: needs rows [M, K], {label} [groups, K, N] and group_sizes [G]; "
                f"got {rows.shape}, {array.shape} and {group_sizes.shape}"
            )
        if array.shape[1] != rows.shape[1]:
            raise ValueError(f"{name}: rows have {rows.shape[1]} columns and {label} {array.shape[1]} rows")
        if array.dtype != rows.dtype:
            raise ValueError(f"{name}: rows are {rows.dtype} and {label} {array.dtype}; cast one of them")
        if group_sizes.shape[0] > array.shape[0]:
            raise ValueError(f"{name}: {group_sizes.shape[0]} groups, but {label} holds {array.shape[0]} matrices")
    if rows.shape[0] < 1 or group_sizes.shape[0] < 1:
        raise ValueError(f"{name}: {rows.shape[0]} rows and {group_sizes.shape[0]} groups; both must be at least 1")
