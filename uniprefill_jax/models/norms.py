"""Root-mean-square norms, in float32 whatever the activations' type."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from pallas_kernels.row_norms import add_rows, choose_backend, norm_rows
from pallas_kernels.row_norms.reference import norm
from uniprefill_jax.models.parameters import ParameterScope, constant
from uniprefill_jax.models.projection import matrix, stack_of

# As functions of their own in the program the kernels are traced and lowered once per shape, however many layers call.
_norm_rows = jax.jit(norm_rows, static_argnames=("eps", "zero_centred", "backend"))
_add_rows = jax.jit(add_rows, static_argnames=("eps", "zero_centred", "backend"))


class RMSNorm(nnx.Module):
    """x / rms(x) times a weight; `zero_centred` families (Gemma-3, Qwen3-Next) store the weight minus one."""

    def __init__(
        self, scope: ParameterScope, size: int, eps: float, *, zero_centred: bool = False, axis: str = "embed"
    ):
        init = constant(0.0 if zero_centred else 1.0)
        self.weight = scope.declare("weight", (size,), (axis,), init=init)
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(
        self, x: Float[Array, "*rows size"], count: Int32[Array, ""] | None = None
    ) -> Float[Array, "*rows size"]:
        """Normalise the last axis; the result has the type of `x`.

        With `count`, the number of real rows, the kernel may run where the machine has one: rows from `count` on are
        then not defined.
        """
        with jax.named_scope("norm"):
            if count is not None and _kernel_takes(x):
                weights, layer = stack_of(self.weight)
                return _norm_rows(x, weights, count, layer=layer, eps=self.eps, zero_centred=self.zero_centred)
            return norm(x, matrix(self.weight), eps=self.eps, zero_centred=self.zero_centred)


def add_residual(
    x: Float[Array, "T D"],
    delta: Float[Array, "T D"],
    output_norm: RMSNorm | None,
    count: Int32[Array, ""] | None,
) -> Float[Array, "T D"]:
    """x + delta, or x + output_norm(delta); `count` as in `RMSNorm`."""
    with jax.named_scope("residual"):
        if count is None or not _kernel_takes(x):
            return x + (delta if output_norm is None else output_norm(delta))
        if output_norm is None:
            return _add_rows(x, delta, count)
        weights, layer = stack_of(output_norm.weight)
        settings = {"eps": output_norm.eps, "zero_centred": output_norm.zero_centred}
        return _add_rows(x, delta, count, weight=weights, layer=layer, **settings)


def _kernel_takes(x: Array) -> bool:
    return x.ndim == 2 and choose_backend(width=x.shape[1], dtype=str(x.dtype)) == "mosaic_gpu"


class GatedRMSNorm(nnx.Module):
    """Norm, plain weight, then a SiLU gate: the output norm of Gated DeltaNet."""

    def __init__(self, scope: ParameterScope, size: int, eps: float):
        self.weight = scope.declare("weight", (size,), ("head_dim",), init=constant(1.0))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"], gate: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Normalise the last axis of `x` and gate it; the result has the type of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weighted = self.weight[...].astype(x.dtype) * wide.astype(x.dtype)
        return (weighted.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
