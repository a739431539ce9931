"""Softmax attention with grouped KV heads: full or sliding, optional QK-norm, optional output gate."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.causal_attention import causal_attention as causal_attention_kernel
from uniprefill_jax.models.batch import PackedRows, last_rows
from uniprefill_jax.models.causal_attention import attention_of_rows, causal_attention, full_causal_attention
from uniprefill_jax.models.config import LayerSpec, ModelConfig
from uniprefill_jax.models.norms import RMSNorm
from uniprefill_jax.models.parameters import ParameterScope, constant
from uniprefill_jax.models.projection import project, project_each
from uniprefill_jax.models.rope import apply_rope
from uniprefill_jax.parallel.mesh import TENSOR
from uniprefill_jax.parallel.shards import mean_over_shards, over_heads
from uniprefill_jax.sparsify.methods.protocol import SparseAttention, computed_share

# A norm before the mixer and the residual sum after it; with the number of real rows they may leave out padding.
Before = Callable[[Array, Array | None], Array]
After = Callable[[Array, Array, Array | None], Array]
# As a function of its own in the program the kernel is traced and lowered once per shape, however many layers use it.
_attention_kernel = jax.jit(causal_attention_kernel, static_argnames=("scale", "backend"))


class AttentionCache(NamedTuple):
    """Keys (after norm and rotary embedding) and values of the rows that entered a layer."""

    keys: Float[Array, "T KV d"]
    values: Float[Array, "T KV d"]


class Attended(NamedTuple):
    """What a layer's attention shows besides its output.

    queries: after norm and rotary embedding, for scoring the prompt.
    computed: share of each request's pairs of rows that was computed; None where all were.
    """

    queries: Float[Array, "T H d"]
    computed: Float[Array, " B"] | None


@struct.dataclass
class AttentionStep:
    """What one decode step of one attention layer sees.

    Attributes:
        prompt: the layer's cache from the prefill.
        generated: keys and values of generated tokens, [capacity, B, KV, d].
        prompt_rows: the rows of the cache that each request may see; None: all.
        prompt_visible: which of them it sees.
        generated_visible: which generated tokens each request sees, the current one included.
        step: number of tokens generated before the current one: where it is written.
        rope: cosines and sines of each request's current position.
    """

    prompt: AttentionCache
    generated: AttentionCache
    prompt_rows: Int32[Array, "B rows"] | None
    prompt_visible: Bool[Array, "B rows"]
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
        self, x: Float[Array, "T D"], rows: PackedRows, before: Before, after: After
    ) -> tuple[Float[Array, "T D"], AttentionCache, Attended]:
        """after(x, attention(before(x))) of packed rows; also the cache and what else the attention shows."""

        def project(x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array, Array | None]:
            return self._project(before(x, rows.kernel_count), rope, rows.kernel_count)

        def finish(x: Array, output: Array, gate: Array | None) -> Array:
            return after(x, self._output(output, gate, rows.kernel_count), rows.kernel_count)

        queries, keys, values, gate = rows.map_rows(project, x, rows.rope(self.rope))
        with jax.named_scope(f"attention_{self.layer.mixer}"):
            sparse, computed = rows.rules.sparse, None
            if sparse is None or self.layer.mixer != "full":
                output = self._attend(queries, keys, values, rows)
            else:
                output, computed = self._attend_sparsely(sparse, queries, keys, values, rows)
        cache = AttentionCache(keys, values)
        return rows.map_rows(finish, x, output, gate), cache, Attended(queries, computed)

    def last(
        self, x: Float[Array, "T D"], rows: PackedRows, before: Before, after: After
    ) -> tuple[Float[Array, "B D"], AttentionCache]:
        """What `__call__` gives for every request's last row alone; keys and values are cached for all rows."""

        def cached(x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array]:
            return self._keys_values(before(x, rows.kernel_count), rope, rows.kernel_count)

        rope = rows.rope(self.rope)
        keys, values = rows.map_rows(cached, x, rope)
        last = last_rows(rows.cu_seqlens, 1)[:, 0]
        queries, gate = self._queries(before(x[last], None), jax.tree.map(lambda table: table[last], rope))
        with jax.named_scope(f"attention_{self.layer.mixer}"):
            output = over_heads(
                partial(attention_of_rows, scale=self.scale),
                queries,
                (keys, values),
                last,
                rows.row_start(self.layer.window)[last],
                head_axis=1,
                out_specs=PartitionSpec(None, TENSOR),
            )
        return after(x[last], self._output(output, gate), None), AttentionCache(keys, values)

    def window_queries(
        self, x: Float[Array, "T D"], rows: PackedRows, before: Before, count: int
    ) -> Float[Array, "B n H d"]:
        """Queries of each request's last `count` rows, right aligned; of a shorter request the first are no queries."""
        window = last_rows(rows.cu_seqlens, count)
        rope = jax.tree.map(lambda table: table[window.reshape(-1)], rows.rope(self.rope))
        queries, _ = self._queries(before(x[window.reshape(-1)], None), rope)
        return queries.reshape(*window.shape, *queries.shape[1:])

    def step(
        self, x: Float[Array, "B D"], view: AttentionStep, count: Int32[Array, ""] | None = None
    ) -> tuple[Float[Array, "B D"], AttentionCache]:
        """One token of every request; also the generated part of the cache with this token written; `count` as in
        `projection.project`."""
        queries, keys, values, gate = self._project(x, view.rope, count)
        generated = AttentionCache(
            *(
                jax.lax.dynamic_update_slice_in_dim(store, new[None].astype(store.dtype), view.step, axis=0)
                for store, new in zip(view.generated, (keys, values), strict=True)
            )
        )
        with jax.named_scope(f"decode_attention_{self.layer.mixer}"):
            seen = (view.prompt_visible, view.generated_visible, view.prompt_rows)
            output = over_heads(
                partial(_attend_step, scale=self.scale),
                queries,
                (*view.prompt, *generated),
                *seen,
                head_axis=1,
                out_specs=PartitionSpec(None, TENSOR),
            )
        return self._output(output, gate, count), generated

    def attend_with[Kept](
        self,
        x: Float[Array, "T D"],
        rope: tuple[Float[Array, "T half"], Float[Array, "T half"]],
        attend: Callable[[Array, Array, Array], tuple[Float[Array, "T H d"], Kept]],
        count: Int32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "T D"], Kept]:
        """Projections, then `attend(queries, keys, values)` -> (output, whatever it keeps), then the output's; `count`
        as in `projection.project`."""
        queries, keys, values, gate = self._project(x, rope, count)
        output, kept = attend(queries, keys, values)
        return self._output(output, gate, count), kept

    def _project(
        self,
        x: Float[Array, "T D"],
        rope: tuple[Float[Array, "T half"], Float[Array, "T half"]],
        count: Int32[Array, ""] | None = None,
    ) -> tuple[Array, Array, Array, Array | None]:
        with jax.named_scope("qkv"):
            weights, biases = (self.q_proj, self.k_proj, self.v_proj), (self.q_bias, self.k_bias, self.v_bias)
            queries, keys, values = project_each(x, weights, biases, count)
        queries, gate = self._turned_queries(queries, rope)
        return queries, self._turned_keys(keys, rope), values, gate

    def _queries(
        self,
        x: Float[Array, "T D"],
        rope: tuple[Float[Array, "T half"], Float[Array, "T half"]],
        count: Int32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "T H d"], Float[Array, "T H d"] | None]:
        """Queries, and the output's gate where there is one."""
        with jax.named_scope("qkv"):
            queries = project(x, self.q_proj, self.q_bias, count)
        return self._turned_queries(queries, rope)

    def _keys_values(
        self,
        x: Float[Array, "T D"],
        rope: tuple[Float[Array, "T half"], Float[Array, "T half"]],
        count: Int32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "T KV d"], Float[Array, "T KV d"]]:
        """Keys and values, as they are cached."""
        with jax.named_scope("qkv"):
            keys = project(x, self.k_proj, self.k_bias, count)
            values = project(x, self.v_proj, self.v_bias, count)
        return self._turned_keys(keys, rope), values

    def _turned_queries(
        self, projected: Float[Array, "T H D"], rope: tuple[Float[Array, "T half"], Float[Array, "T half"]]
    ) -> tuple[Float[Array, "T H d"], Float[Array, "T H d"] | None]:
        """What the query projection gives, as attention takes it, and the output's gate where there is one."""
        queries, gate = jnp.split(projected, 2, axis=-1) if self.gated else (projected, None)
        if self.q_norm is not None:
            with jax.named_scope("qkv"):
                queries = self.q_norm(queries)
        with jax.named_scope("rope"):
            return apply_rope(queries, rope), gate

    def _turned_keys(
        self, projected: Float[Array, "T KV d"], rope: tuple[Float[Array, "T half"], Float[Array, "T half"]]
    ) -> Float[Array, "T KV d"]:
        """What the key projection gives, as it is cached."""
        if self.k_norm is not None:
            with jax.named_scope("qkv"):
                projected = self.k_norm(projected)
        with jax.named_scope("rope"):
            return apply_rope(projected, rope)

    def _attend(
        self,
        queries: Float[Array, "T H d"],
        keys: Float[Array, "T KV d"],
        values: Float[Array, "T KV d"],
        rows: PackedRows,
    ) -> Float[Array, "T H d"]:
        window = self.layer.window
        backend = rows.rules.full_attention if window is None else rows.rules.sliding_attention
        ranges = (rows.row_start(window), rows.count)
        if backend == "cudnn":
            attend, ranges = full_causal_attention, ()
        else:
            attend = _attention_kernel if backend == "kernel" else causal_attention
        attend = partial(attend, scale=self.scale)
        cut = PartitionSpec(None, TENSOR)
        return over_heads(attend, queries, (keys, values), *ranges, head_axis=1, out_specs=cut)

    def _attend_sparsely(
        self,
        sparse: SparseAttention,
        queries: Float[Array, "T H d"],
        keys: Float[Array, "T KV d"],
        values: Float[Array, "T KV d"],
        rows: PackedRows,
    ) -> tuple[Float[Array, "T H d"], Float[Array, " B"]]:
        """Full attention of the entries that `sparse` chooses, and what share of each request's they are."""

        def attend(queries: Array, keys: Array, values: Array, cu_seqlens: Array) -> tuple[Array, Array]:
            seen, blocks = sparse.seen(queries, keys, cu_seqlens, self.scale)
            output = block_sparse_attention(
                queries,
                keys,
                values,
                cu_seqlens,
                seen.blocks,
                seen.columns,
                block_size=sparse.block_size,
                scale=self.scale,
            )
            return output, mean_over_shards(computed_share(seen, blocks))

        cut = (PartitionSpec(None, TENSOR), PartitionSpec())
        return over_heads(attend, queries, (keys, values), rows.cu_seqlens, head_axis=1, out_specs=cut)

    def _output(
        self,
        output: Float[Array, "T H d"],
        gate: Float[Array, "T H d"] | None,
        count: Int32[Array, ""] | None = None,
    ) -> Float[Array, "T D"]:
        with jax.named_scope("attention_output"):
            if gate is not None:
                output = output * jax.nn.sigmoid(gate)
            return project(output, self.o_proj, self.o_bias, count)


def _attend_step(
    queries: Float[Array, "B H d"],
    prompt_keys: Float[Array, "T KV d"],
    prompt_values: Float[Array, "T KV d"],
    generated_keys: Float[Array, "capacity B KV d"],
    generated_values: Float[Array, "capacity B KV d"],
    prompt_visible: Bool[Array, "B rows"],
    generated_visible: Bool[Array, "B capacity"],
    prompt_rows: Int32[Array, "B rows"] | None,
    *,
    scale: float,
) -> Float[Array, "B H d"]:
    """Attention of one query per request over prompt rows and generated tokens."""
    batch, num_heads, head_dim = queries.shape
    num_prompt, num_kv_heads = prompt_visible.shape[1], prompt_keys.shape[1]
    grouped = queries.reshape(batch, num_kv_heads, -1, head_dim)
    prompt = "tkd"
    if prompt_rows is not None:
        prompt_keys, prompt_values = prompt_keys[prompt_rows], prompt_values[prompt_rows]
        prompt = "btkd"
    to_prompt = jnp.einsum(f"bkgd,{prompt}->bkgt", grouped, prompt_keys, preferred_element_type=jnp.float32)
    to_generated = jnp.einsum("bkgd,cbkd->bkgc", grouped, generated_keys, preferred_element_type=jnp.float32)
    scores = [_masked(to_prompt * scale, prompt_visible), _masked(to_generated * scale, generated_visible)]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(generated_values.dtype)
    from_prompt, from_generated = weights[..., :num_prompt], weights[..., num_prompt:]
    output = jnp.einsum(f"bkgt,{prompt}->bkgd", from_prompt, prompt_values, preferred_element_type=jnp.float32)
    output += jnp.einsum("bkgc,cbkd->bkgd", from_generated, generated_values, preferred_element_type=jnp.float32)
    return output.reshape(batch, num_heads, head_dim).astype(queries.dtype)


def _bias(scope: ParameterScope, name: str, dimensions: tuple[tuple[int, str], ...]) -> nnx.Param:
    shape = tuple(size for size, _ in dimensions)
    flat = 1
    for size in shape:
        flat *= size
    return scope.declare(name, shape, tuple(axis for _, axis in dimensions), init=constant(0.0), file_shape=(flat,))


def _head_norm(scope: ParameterScope, config: ModelConfig) -> RMSNorm:
    return RMSNorm(scope, config.head_dim, config.rms_norm_eps, zero_centred=True, axis="head_dim")


def _masked(scores: Float[Array, "B KV G keys"], visible: Bool[Array, "B keys"]) -> Float[Array, "B KV G keys"]:
    return jnp.where(visible[:, None, None, :], scores, -jnp.inf)
