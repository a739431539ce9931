"""The gated delta rule over packed requests: the entry point that picks a backend."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.gated_delta_rule import gpu, tpu
from pallas_kernels.gated_delta_rule.chunked import gated_delta_rule_xla
from pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference
from pallas_kernels.platform import kernels_of

Chosen = Literal["xla", "mosaic_gpu", "mosaic_tpu"]
Backend = Literal["auto", "reference", "xla", "mosaic_gpu", "mosaic_tpu"]

_BACKENDS = {
    "reference": gated_delta_rule_reference,
    "xla": gated_delta_rule_xla,
    "mosaic_gpu": gpu.gated_delta_rule_mosaic_gpu,
    "mosaic_tpu": tpu.gated_delta_rule_mosaic_tpu,
}


def choose_backend(
    *,
    value_heads: int = 32,
    key_heads: int = 16,
    key_dim: int = 128,
    value_dim: int = 128,
    dtype: str = "bfloat16",
    platform: str | None = None,
) -> Chosen:
    """Name the backend that `backend="auto"` takes for these shapes on `platform` (default: what jax runs on).

    The kernel wherever the machine has one that takes the shape, else the chunked form in plain XLA, which needs no
    more memory and far fewer steps than the reference.
    """
    kernels = kernels_of(platform)
    if kernels == "reference":
        return "xla"
    unsupported = gpu.unsupported if kernels == "mosaic_gpu" else tpu.unsupported
    reason = unsupported(value_heads, key_heads, key_dim, value_dim, jnp.dtype(dtype), jnp.dtype(dtype))
    return "xla" if reason is not None else kernels


def gated_delta_rule(
    queries: Float[Array, "T Hk dk"],
    keys: Float[Array, "T Hk dk"],
    values: Float[Array, "T Hv dv"],
    log_decay: Float[Array, "T Hv"],
    strength: Float[Array, "T Hv"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    initial_state: Float[Array, "B Hv dk dv"] | None = None,
    normalise: bool = True,
    backend: Backend = "auto",
) -> tuple[Float[Array, "T Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Every row's output of the gated delta rule, and the state that each request leaves behind.

    Per value head, with decay a = exp(log_decay), strength b and state S [dk, dv], row after row of a request:
        S <- a S + k (b (v - (a S)^T k))^T        output = S^T q
    where k is the key of unit length and q the query of unit length times dk**-0.5 (Yang et al., Gated Delta Networks,
    arXiv 2412.06464).

    Args:
        queries, keys: value head h takes those of key head ``h // (Hv / Hk)``; nothing is repeated in memory.
        values: the dtype of the kernels' outputs.
        log_decay: at most 0.
        strength: between 0 and 1.
        cu_seqlens: request r owns rows ``[cu_seqlens[r], cu_seqlens[r+1])``; traced, so lengths never recompile. Rows
            from ``cu_seqlens[B]`` on are padding, whatever they hold.
        initial_state: what each request starts from; default: zeros.
        normalise: divide queries and keys by their length, sqrt(sum of squares + 1e-6), and queries by sqrt(dk); False
            takes both as they are, and then keys must not be longer than one.
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

    Returns:
        Outputs, zero in padding rows, float32 from "reference" and "xla" and in the dtype of the values from the
        kernels; final states, float32. A request without rows keeps the state it started from.

    Raises:
        ValueError: shapes that do not fit together, or that the named backend cannot take.
    """
    _check(queries, keys, values, log_decay, strength, cu_seqlens, initial_state)
    chosen = backend
    if backend == "auto":
        # Arrays of several dtypes are no kernel's: float32 stands for them.
        dtypes = {str(array.dtype) for array in (queries, keys, values)}
        chosen = choose_backend(
            value_heads=values.shape[1],
            key_heads=keys.shape[1],
            key_dim=keys.shape[2],
            value_dim=values.shape[2],
            dtype=dtypes.pop() if len(dtypes) == 1 else "float32",
        )
    if chosen not in _BACKENDS:
        raise ValueError(f"gated_delta_rule: backend is {backend!r}; use 'auto', {', '.join(map(repr, _BACKENDS))}")
    return _BACKENDS[chosen](
        queries, keys, values, log_decay, strength, cu_seqlens, initial_state=initial_state, normalise=normalise
    )


def _check(queries, keys, values, log_decay, strength, cu_seqlens, initial_state) -> None:
    if queries.ndim != 3 or queries.shape != keys.shape or values.ndim != 3 or cu_seqlens.ndim != 1:
        raise ValueError(
            "gated_delta_rule: needs queries and keys [T, Hk, dk], values [T, Hv, dv] and cu_seqlens [B+1]; "
            f"got {queries.shape}, {keys.shape}, {values.shape} and {cu_seqlens.shape}"
        )
    rows, key_heads, key_dim = keys.shape
    value_heads, value_dim = values.shape[1:]
    batch = cu_seqlens.shape[0] - 1
    if min(rows, key_heads, value_heads, batch) < 1:
        raise ValueError(
            f"gated_delta_rule: {rows} rows, {key_heads} key heads, {value_heads} value heads and {batch} requests "
            "must all be at least 1"
        )
    if values.shape[0] != rows:
        raise ValueError(f"gated_delta_rule: values have {values.shape[0]} rows and keys {rows}")
    if value_heads % key_heads:
        raise ValueError(f"gated_delta_rule: {value_heads} value heads are not a multiple of {key_heads} key heads")
    for name, array in (("log_decay", log_decay), ("strength", strength)):
        if array.shape != (rows, value_heads):
            raise ValueError(f"gated_delta_rule: {name} has shape {array.shape}; it needs {(rows, value_heads)}")
    wanted = (batch, value_heads, key_dim, value_dim)
    if initial_state is not None and initial_state.shape != wanted:
        raise ValueError(f"gated_delta_rule: initial_state has shape {initial_state.shape}; it needs {wanted}")
