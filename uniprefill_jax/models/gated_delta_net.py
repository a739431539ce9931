"""Gated DeltaNet (Qwen3-Next): a width-4 causal convolution, then the gated delta rule, in chunks of 64 rows.

Per value head, with decay a_t = exp(g_t), key k_t, value v_t, strength beta_t, float32 state S [key_dim, value_dim]:
    S_t = a_t S_{t-1} + k_t (beta_t (v_t - (a_t S_{t-1})^T k_t))^T        o_t = S_t^T q_t
Requests are laid out in whole chunks of their own, so a state never crosses from one request to the next; the rows
that fill a chunk up have beta = 0 and g = 0 and leave the state as it is.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.batch import PackedRows, last_rows
from uniprefill_jax.models.config import ModelConfig
from uniprefill_jax.models.norms import GatedRMSNorm
from uniprefill_jax.models.parameters import ParameterScope, constant, normal

CHUNK = 64
# Chunks whose inner systems are solved together, before the states pass through them one by one.
CHUNKS_AT_ONCE = 8

RowFunction = Callable[[Array], Array]


class RecurrentCache(NamedTuple):
    """What a request leaves behind after its last row: the convolution's last inputs and the state."""

    conv_state: Float[Array, "B width-1 channels"]
    recurrent_state: Float[Array, "B heads key_dim value_dim"]


class GatedDeltaNet(nnx.Module):
    """The linear-attention mixer. Projections stay interleaved per key-head group, as in the checkpoint."""

    def __init__(self, scope: ParameterScope, config: ModelConfig):
        shape = config.gated_delta_net
        if shape is None:
            raise AssertionError("a linear-attention layer needs config.gated_delta_net")
        ratio = shape.num_value_heads // shape.num_key_heads
        key_dim = shape.num_key_heads * shape.key_head_dim
        value_dim = shape.num_value_heads * shape.value_head_dim
        channels = 2 * key_dim + value_dim
        embed = ((config.hidden_size, "embed"),)
        groups = (shape.num_key_heads, "key_heads")
        group_width = 2 * shape.key_head_dim + 2 * ratio * shape.value_head_dim
        self.in_proj_qkvz = scope.linear("in_proj_qkvz.weight", embed, (groups, (group_width, "group")))
        self.in_proj_ba = scope.linear("in_proj_ba.weight", embed, (groups, (2 * ratio, "group")))
        self.conv = scope.declare(
            "conv1d.weight",
            (shape.conv_width, channels),
            ("conv_width", "channels"),
            init=normal(shape.conv_width**-0.5),
            permutation=(1, 0),
            file_shape=(channels, 1, shape.conv_width),
        )
        self.dt_bias = scope.declare("dt_bias", (shape.num_value_heads,), ("value_heads",), init=constant(1.0))
        self.a_log = scope.declare("A_log", (shape.num_value_heads,), ("value_heads",), init=_decay_init)
        self.norm = GatedRMSNorm(scope.child("norm"), shape.value_head_dim, config.rms_norm_eps)
        self.out_proj = scope.linear(
            "out_proj.weight", ((shape.num_value_heads, "value_heads"), (shape.value_head_dim, "head_dim")), embed
        )
        self.shape = shape

    def __call__(
        self, x: Float[Array, "T D"], rows: PackedRows, before: RowFunction, after: Callable[[Array, Array], Array]
    ) -> tuple[Float[Array, "T D"], RecurrentCache, None]:
        """after(x, mixer(before(x))) of packed rows, every request from an empty state; also what is left behind."""
        mixed, gate, log_decay, strength = rows.map_rows(lambda x: self._project(before(x)), x)
        with jax.named_scope("causal_conv"):
            convolved = causal_conv(mixed, self.conv[...], rows.row_start(None))
            width = self.shape.conv_width - 1
            recent = last_rows(rows.cu_seqlens, width)
            exists = rows.cu_seqlens[1:, None] - width + jnp.arange(width) >= rows.cu_seqlens[:-1, None]
            conv_state = jnp.where(exists[..., None], mixed[recent], 0)
        with jax.named_scope("gated_delta_rule"):
            queries, keys, values = self._split(jax.nn.silu(convolved))
            output, state = gated_delta_rule(queries, keys, values, log_decay, strength, rows.cu_seqlens)

        def finish(x: Array, output: Array, gate: Array) -> Array:
            return after(x, self._output(output.astype(x.dtype), gate))

        return rows.map_rows(finish, x, output, gate), RecurrentCache(conv_state, state), None

    def step(self, x: Float[Array, "B D"], cache: RecurrentCache) -> tuple[Float[Array, "B D"], RecurrentCache]:
        """One token of every request."""
        mixed, gate, log_decay, strength = self._project(x)
        with jax.named_scope("causal_conv"):
            inputs = jnp.concatenate([cache.conv_state, mixed[:, None]], axis=1)
            convolved = jnp.einsum("bwc,wc->bc", inputs, self.conv[...])
        with jax.named_scope("gated_delta_rule"):
            queries, keys, values = self._split(jax.nn.silu(convolved))
            output, state = gated_delta_step(queries, keys, values, log_decay, strength, cache.recurrent_state)
        return self._output(output.astype(x.dtype), gate), RecurrentCache(inputs[:, 1:], state)

    def _project(self, x: Float[Array, "T D"]) -> tuple[Array, Array, Array, Array]:
        """Convolution inputs [T, channels], output gate [T, Hv, dv], log decay and strength [T, Hv] in float32."""
        shape = self.shape
        ratio = shape.num_value_heads // shape.num_key_heads
        with jax.named_scope("qkvz"):
            projected = jnp.einsum("te,egw->tgw", x, self.in_proj_qkvz[...])
            strength_decay = jnp.einsum("te,egw->tgw", x, self.in_proj_ba[...])
        key, value = shape.key_head_dim, ratio * shape.value_head_dim
        queries, keys, values, gate = jnp.split(projected, (key, 2 * key, 2 * key + value), axis=-1)
        strength, decay = jnp.split(strength_decay, 2, axis=-1)
        num_rows = x.shape[0]
        mixed = jnp.concatenate([part.reshape(num_rows, -1) for part in (queries, keys, values)], axis=-1)
        gate = gate.reshape(num_rows, shape.num_value_heads, shape.value_head_dim)
        strength = jax.nn.sigmoid(strength.reshape(num_rows, -1).astype(jnp.float32))
        decay = decay.reshape(num_rows, -1).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)
        log_decay = -jnp.exp(self.a_log[...].astype(jnp.float32)) * jax.nn.softplus(decay)
        return mixed, gate, log_decay, strength

    def _split(self, convolved: Float[Array, "T channels"]) -> tuple[Array, Array, Array]:
        """Unit queries and keys [T, Hv, dk] (repeated for a group's value heads) and values [T, Hv, dv], float32."""
        shape = self.shape
        ratio = shape.num_value_heads // shape.num_key_heads
        key_dim = shape.num_key_heads * shape.key_head_dim
        wide = convolved.astype(jnp.float32)
        queries, keys, values = jnp.split(wide, (key_dim, 2 * key_dim), axis=-1)
        heads = (wide.shape[0], shape.num_key_heads, shape.key_head_dim)
        queries = _unit_length(queries.reshape(heads)) * shape.key_head_dim**-0.5
        keys = _unit_length(keys.reshape(heads))
        values = values.reshape(wide.shape[0], shape.num_value_heads, shape.value_head_dim)
        return jnp.repeat(queries, ratio, axis=1), jnp.repeat(keys, ratio, axis=1), values

    def _output(self, output: Float[Array, "T Hv dv"], gate: Float[Array, "T Hv dv"]) -> Float[Array, "T D"]:
        with jax.named_scope("linear_attention_output"):
            return jnp.einsum("thd,hde->te", self.norm(output, gate), self.out_proj[...])


def causal_conv(
    x: Float[Array, "T channels"], weight: Float[Array, "width channels"], row_start: Int32[Array, " T"]
) -> Float[Array, "T channels"]:
    """Depthwise causal convolution that does not reach past a request's first row."""
    width = weight.shape[0]
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    output = x * weight[-1]
    for back in range(1, width):
        shifted = jnp.pad(x, ((back, 0), (0, 0)))[: x.shape[0]]
        reaches = rows - back >= row_start
        output = output + jnp.where(reaches[:, None], shifted, 0) * weight[width - 1 - back]
    return output


def gated_delta_rule(
    queries: Float[Array, "T H dk"],
    keys: Float[Array, "T H dk"],
    values: Float[Array, "T H dv"],
    log_decay: Float[Array, "T H"],
    strength: Float[Array, "T H"],
    cu_seqlens: Int32[Array, " B+1"],
) -> tuple[Float[Array, "T H dv"], Float[Array, "B H dk dv"]]:
    """Outputs of every row and each request's final state, all float32; padding rows give zeros."""
    num_rows, num_heads, key_dim = queries.shape
    value_dim = values.shape[-1]
    num_requests = cu_seqlens.shape[0] - 1
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    chunk_ends = jnp.cumsum((lengths + CHUNK - 1) // CHUNK)
    chunk_starts = jnp.concatenate([jnp.zeros(1, chunk_ends.dtype), chunk_ends])
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))

    def advance(carry: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        state, finals = carry
        owner, is_first, query, attention, new_value, decayed_key, key, decay = chunk
        state = jnp.where(is_first, 0.0, state)
        corrected = new_value - jnp.einsum("hik,hkv->hiv", decayed_key, state)
        output = jnp.einsum("hik,hkv->hiv", query, state) + jnp.einsum("hij,hjv->hiv", attention, corrected)
        state = state * decay[:, None, None] + jnp.einsum("hik,hiv->hkv", key, corrected)
        return (state, finals.at[owner].set(state, mode="drop")), output

    def several_chunks(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, finals, packed = carry
        chunk = number * CHUNKS_AT_ONCE + jnp.arange(CHUNKS_AT_ONCE, dtype=jnp.int32)
        owner = jnp.searchsorted(chunk_ends, chunk, side="right", method="compare_all").astype(jnp.int32)
        within = chunk - chunk_starts[owner]
        rows = cu_seqlens[owner][:, None] + within[:, None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        # Past the last chunk `owner` is the number of requests, which owns nothing.
        ends = jnp.where(owner < num_requests, cu_seqlens[jnp.minimum(owner, num_requests - 1) + 1], 0)
        real = rows < ends[:, None]

        def take(x: Array) -> Array:
            """[T, H, ...] to [chunks, H, CHUNK, ...], zero where a chunk is longer than its request."""
            mask = real.reshape(real.shape + (1,) * (x.ndim - 1))
            return jnp.where(mask, x[jnp.where(real, rows, 0)], 0).swapaxes(1, 2)

        q, k, v, g, beta = (take(x) for x in (queries, keys, values, log_decay, strength))
        decay = jnp.cumsum(g, axis=-1)
        # Differences above the diagonal are positive and could overflow: mask before exp.
        pairwise = jnp.exp(jnp.where(lower, decay[..., :, None] - decay[..., None, :], -jnp.inf))
        k_beta = k * beta[..., None]
        system = jnp.einsum("chid,chjd->chij", k_beta, k) * pairwise
        right = jnp.concatenate([v * beta[..., None], k_beta * jnp.exp(decay)[..., None]], axis=-1)
        solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
        chunks = (
            owner,
            within == 0,
            q * jnp.exp(decay)[..., None],
            jnp.einsum("chid,chjd->chij", q, k) * pairwise,
            solved[..., :value_dim],
            solved[..., value_dim:],
            k * jnp.exp(decay[..., -1:] - decay)[..., None],
            jnp.exp(decay[..., -1]),
        )
        (state, finals), outputs = jax.lax.scan(advance, (state, finals), chunks)
        outputs = outputs.swapaxes(1, 2).reshape(CHUNKS_AT_ONCE * CHUNK, num_heads, value_dim)
        return state, finals, packed.at[jnp.where(real, rows, num_rows).reshape(-1)].set(outputs, mode="drop")

    empty = (
        jnp.zeros((num_heads, key_dim, value_dim), jnp.float32),
        jnp.zeros((num_requests, num_heads, key_dim, value_dim), jnp.float32),
        jnp.zeros((num_rows, num_heads, value_dim), jnp.float32),
    )
    used = (chunk_ends[-1] + CHUNKS_AT_ONCE - 1) // CHUNKS_AT_ONCE
    _, finals, packed = jax.lax.fori_loop(0, used, several_chunks, empty)
    return packed, finals


def gated_delta_step(
    queries: Float[Array, "B H dk"],
    keys: Float[Array, "B H dk"],
    values: Float[Array, "B H dv"],
    log_decay: Float[Array, "B H"],
    strength: Float[Array, "B H"],
    state: Float[Array, "B H dk dv"],
) -> tuple[Float[Array, "B H dv"], Float[Array, "B H dk dv"]]:
    """One token of every request: the recurrence as written at the top of this file."""
    state = state * jnp.exp(log_decay)[..., None, None]
    error = (values - jnp.einsum("bhkv,bhk->bhv", state, keys)) * strength[..., None]
    state = state + keys[..., :, None] * error[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", state, queries), state


def _unit_length(x: Float[Array, "T H d"]) -> Float[Array, "T H d"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _decay_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)
