"""Root-mean-square norms, in float32 whatever the activations' type."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from uniprefill_jax.models.parameters import ParameterScope, constant


class RMSNorm(nnx.Module):
    """x / rms(x) times a weight; `zero_centred` families (Gemma-3, Qwen3-Next) store the weight minus one."""

    def __init__(
        self, scope: ParameterScope, size: int, eps: float, *, zero_centred: bool = False, axis: str = "embed"
    ):
        init = constant(0.0 if zero_centred else 1.0)
        self.weight = scope.declare("weight", (size,), (axis,), init=init)
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Normalise the last axis; the result has the type of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        if self.zero_centred:
            return (wide * (1.0 + weight)).astype(x.dtype)
        # Llama checkpoints were trained with the product taken in the activations' type.
        return wide.astype(x.dtype) * weight.astype(x.dtype)


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
