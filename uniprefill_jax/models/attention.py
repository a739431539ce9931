"""Softmax attention with grouped KV heads: full or sliding, optional QK-norm, optional output gate."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int32

from uniprefill_jax.models.batch import PackedRows
from uniprefill_jax.models.causal_attention import causal_attention, full_causal_attention
from uniprefill_jax.models.config import LayerSpec, ModelConfig
from uniprefill_jax.models.norms import RMSNorm
from uniprefill_jax.models.parameters import ParameterScope, constant
from uniprefill_jax.models.rope import apply_rope

RowFunction = Callable[[Array], Array]


class AttentionCache(NamedTuple):
    """Keys (after norm and rotary embedding) and values of the rows that entered a layer."""

    keys: Float[Array, "T KV d"]
    values: Float[Array, "T KV d"]


@struct.dataclass
class AttentionStep:
    """What one decode step of one attention layer sees.

    Attributes:
        prompt: the layer's cache from the prefill.
        generated: keys and values of generated tokens, [capacity, B, KV, d].
        prompt_visible: which prompt rows each request sees.
        generated_visible: which generated tokens each request sees, the current one included.
        step: number of tokens generated before the current one: where it is written.
        rope: cosines and sines of each request's current position.
    """

    prompt: AttentionCache
    generated: AttentionCache
    prompt_visible: Bool[Array, "B T"]
    generated_visible: Bool[Array, "B capacity"]
    step: Int32[Array, ""]
    rope: tuple[Float[Array, "B half"], Float[Array, "B half"]]


class Attention(nnx.Module):
    """Projections, norms, rotary embedding and the attention itself.

    `gated` (Qwen3-Next): the query projection yields [query, gate] interleaved per head, and sigmoid(gate) multiplies
    the output. `qk_norm` (Gemma-3, Qwen3-Next): zero-centred norms over each head of queries and keys.
    """

    def __init__(
        self,
        scope: ParameterScope,
        config: ModelConfig,
        layer: LayerSpec,
        *,
        qk_norm: bool = False,
        gated: bool = False,
    ):
        embed = ((config.hidden_size, "embed"),)
        query_size = config.head_dim * (2 if gated else 1)
        query = ((config.num_heads, "heads"), (query_size, "head_dim"))
        key_value = ((config.num_kv_heads, "kv_heads"), (config.head_dim, "head_dim"))
        self.q_proj = scope.linear("q_proj.weight", embed, query)
        self.k_proj = scope.linear("k_proj.weight", embed, key_value)
        self.v_proj = scope.linear("v_proj.weight", embed, key_value)
        self.o_proj = scope.linear("o_proj.weight", ((config.num_heads, "heads"), (config.head_dim, "head_dim")), embed)
        biased = config.attention_bias
        self.q_bias = _bias(scope, "q_proj.bias", query) if biased else None
        self.k_bias = _bias(scope, "k_proj.bias", key_value) if biased else None
        self.v_bias = _bias(scope, "v_proj.bias", key_value) if biased else None
        self.o_bias = _bias(scope, "o_proj.bias", embed) if biased else None
        self.q_norm = _head_norm(scope.child("q_norm"), config) if qk_norm else None
        self.k_norm = _head_norm(scope.child("k_norm"), config) if qk_norm else None
        self.scale = config.attention_scale
        if layer.rope is None:
            raise AssertionError("an attention layer needs a rotary configuration")
        self.layer = layer
        self.rope = layer.rope
        self.gated = gated

    def __call__(
        self, x: Float[Array, "T D"], rows: PackedRows, before: RowFunction, after: Callable[[Array, Array], Array]
    ) -> tuple[Float[Array, "T D"], AttentionCache, Float[Array, "T H d"]]:
        """after(x, attention(before(x))) of packed rows; also the cache and the queries (for scoring the prompt)."""

        def project(x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array, Array | None]:
            return self._project(before(x), rope)

        def finish(x: Array, output: Array, gate: Array | None) -> Array:
            return after(x, self._output(output, gate))

        queries, keys, values, gate = rows.map_rows(project, x, rows.rope(self.rope))
        with jax.named_scope(f"attention_{self.layer.mixer}"):
            if rows.rules.full_attention == "cudnn" and self.layer.window is None:
                output = full_causal_attention(queries, keys, values, scale=self.scale)
            else:
                start = rows.row_start(self.layer.window)
                output = causal_attention(queries, keys, values, start, rows.count, scale=self.scale)
        return rows.map_rows(finish, x, output, gate), AttentionCache(keys, values), queries

    def step(self, x: Float[Array, "B D"], view: AttentionStep) -> tuple[Float[Array, "B D"], AttentionCache]:
        """One token of every request; also the generated part of the cache with this token written."""
        queries, keys, values, gate = self._project(x, view.rope)
        generated = AttentionCache(
            *(
                jax.lax.dynamic_update_slice_in_dim(store, new[None].astype(store.dtype), view.step, axis=0)
                for store, new in zip(view.generated, (keys, values), strict=True)
            )
        )
        with jax.named_scope(f"decode_attention_{self.layer.mixer}"):
            batch, num_heads, head_dim = queries.shape
            grouped = queries.reshape(batch, keys.shape[1], -1, head_dim)
            scores = jnp.concatenate(
                [
                    _masked(
                        jnp.einsum("bkgd,tkd->bkgt", grouped, view.prompt.keys, preferred_element_type=jnp.float32)
                        * self.scale,
                        view.prompt_visible,
                    ),
                    _masked(
                        jnp.einsum("bkgd,cbkd->bkgc", grouped, generated.keys, preferred_element_type=jnp.float32)
                        * self.scale,
                        view.generated_visible,
                    ),
                ],
                axis=-1,
            )
            weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
            num_prompt = view.prompt.keys.shape[0]
            output = jnp.einsum(
                "bkgt,tkd->bkgd", weights[..., :num_prompt], view.prompt.values, preferred_element_type=jnp.float32
            ) + jnp.einsum(
                "bkgc,cbkd->bkgd", weights[..., num_prompt:], generated.values, preferred_element_type=jnp.float32
            )
            output = output.reshape(batch, num_heads, head_dim).astype(x.dtype)
        return self._output(output, gate), generated

    def _project(
        self, x: Float[Array, "T D"], rope: tuple[Float[Array, "T half"], Float[Array, "T half"]]
    ) -> tuple[Array, Array, Array, Array | None]:
        with jax.named_scope("qkv"):
            queries = _project(x, self.q_proj, self.q_bias)
            keys = _project(x, self.k_proj, self.k_bias)
            values = _project(x, self.v_proj, self.v_bias)
            gate = None
            if self.gated:
                queries, gate = jnp.split(queries, 2, axis=-1)
            if self.q_norm is not None and self.k_norm is not None:
                queries, keys = self.q_norm(queries), self.k_norm(keys)
        with jax.named_scope("rope"):
            return apply_rope(queries, rope), apply_rope(keys, rope), values, gate

    def _output(self, output: Float[Array, "T H d"], gate: Float[Array, "T H d"] | None) -> Float[Array, "T D"]:
        with jax.named_scope("attention_output"):
            if gate is not None:
                output = output * jax.nn.sigmoid(gate)
            projected = jnp.einsum("thd,hde->te", output, self.o_proj[...])
            return projected if self.o_bias is None else projected + self.o_bias[...]


def _bias(scope: ParameterScope, name: str, dimensions: tuple[tuple[int, str], ...]) -> nnx.Param:
    shape = tuple(size for size, _ in dimensions)
    flat = 1
    for size in shape:
        flat *= size
    return scope.declare(name, shape, tuple(axis for _, axis in dimensions), init=constant(0.0), file_shape=(flat,))


def _head_norm(scope: ParameterScope, config: ModelConfig) -> RMSNorm:
    return RMSNorm(scope, config.head_dim, config.rms_norm_eps, zero_centred=True, axis="head_dim")


def _project(x: Float[Array, "T D"], weight: nnx.Param, bias: nnx.Param | None) -> Float[Array, "T heads d"]:
    projected = jnp.einsum("te,ehd->thd", x, weight[...])
    return projected if bias is None else projected + bias[...]


def _masked(scores: Float[Array, "B KV G keys"], visible: Bool[Array, "B keys"]) -> Float[Array, "B KV G keys"]:
    return jnp.where(visible[:, None, None, :], scores, -jnp.inf)
