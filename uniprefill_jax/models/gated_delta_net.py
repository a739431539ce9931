"""Gated DeltaNet (Qwen3-Next): a width-4 causal convolution, then the gated delta rule (see pallas_kernels)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from pallas_kernels.gated_delta_rule import gated_delta_rule, gated_delta_step
from uniprefill_jax.models.attention import After, Before
from uniprefill_jax.models.batch import PackedRows, last_rows, request_of_row
from uniprefill_jax.models.config import ModelConfig
from uniprefill_jax.models.norms import GatedRMSNorm
from uniprefill_jax.models.parameters import ParameterScope, constant, normal
from uniprefill_jax.models.projection import project
from uniprefill_jax.parallel.mesh import TENSOR
from uniprefill_jax.parallel.shards import per_shard, whole

# As a function of its own in the program the rule is traced and lowered once per shape, however many layers use it.
_shard_rule = jax.jit(gated_delta_rule, static_argnames=("normalise", "backend"))


class RecurrentCache(NamedTuple):
    """What a request leaves behind after its last row: the convolution's last inputs and the state."""

    conv_state: Float[Array, "B width-1 channels"]  # in key-head groups: queries, keys and values of one, of the next
    recurrent_state: Float[Array, "B heads key_dim value_dim"]


class GatedDeltaNet(nnx.Module):
    """The linear-attention mixer. Projections stay interleaved per key-head group, as in the checkpoint."""

    def __init__(self, scope: ParameterScope, config: ModelConfig):
        shape = config.gated_delta_net
        if shape is None:
            raise AssertionError("a linear-attention layer needs config.gated_delta_net")
        ratio = shape.num_value_heads // shape.num_key_heads
        channels = shape.conv_channels
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
        self, x: Float[Array, "T D"], rows: PackedRows, before: Before, after: After
    ) -> tuple[Float[Array, "T D"], RecurrentCache, None]:
        """after(x, mixer(before(x))) of packed rows, every request from an empty state; also what is left behind."""
        output, gate, cache = self._recur(x, rows, before)

        def finish(x: Array, output: Array, gate: Array) -> Array:
            return after(x, self._output(output.astype(x.dtype), gate, rows.kernel_count), rows.kernel_count)

        return rows.map_rows(finish, x, output, gate), cache, None

    def last(
        self, x: Float[Array, "T D"], rows: PackedRows, before: Before, after: After
    ) -> tuple[Float[Array, "B D"], RecurrentCache]:
        """What `__call__` gives for every request's last row alone."""
        output, gate, cache = self._recur(x, rows, before)
        last = last_rows(rows.cu_seqlens, 1)[:, 0]
        return after(x[last], self._output(output[last].astype(x.dtype), gate[last]), None), cache

    def _recur(
        self, x: Float[Array, "T D"], rows: PackedRows, before: Before
    ) -> tuple[Float[Array, "T Hv dv"], Float[Array, "T Hv dv"], RecurrentCache]:
        """The rule's outputs, their gates, and what is left behind."""
        count = rows.kernel_count
        mixed, gate, log_decay, strength = rows.map_rows(lambda x: self._project(before(x, count), count), x)
        with jax.named_scope("causal_conv"):
            convolved = causal_conv(mixed, self._taps(), rows.row_start(None))
            width = self.shape.conv_width - 1
            recent = last_rows(rows.cu_seqlens, width)
            exists = rows.cu_seqlens[1:, None] - width + jnp.arange(width) >= rows.cu_seqlens[:-1, None]
            conv_state = jnp.where(exists[..., None], mixed[recent], 0)
        with jax.named_scope("gated_delta_rule"):
            # The rule's kernel first reduces the values: fused with that, XLA's convolution took eight times as long.
            queries, keys, values = jax.lax.optimization_barrier(self._split(jax.nn.silu(convolved)))
            output, state = _rule(queries, keys, values, log_decay, strength, rows.cu_seqlens, None)
        return output, gate, RecurrentCache(conv_state, state)

    def step(
        self, x: Float[Array, "B D"], cache: RecurrentCache, count: Int32[Array, ""] | None = None
    ) -> tuple[Float[Array, "B D"], RecurrentCache]:
        """One token of every request; `count` as in `projection.project`."""
        mixed, gate, log_decay, strength = self._project(x, count)
        with jax.named_scope("causal_conv"):
            inputs = jnp.concatenate([cache.conv_state, mixed[:, None]], axis=1)
            convolved = jnp.einsum("bwc,wc->bc", inputs, self._taps())
        with jax.named_scope("gated_delta_rule"):
            queries, keys, values = self._split(jax.nn.silu(convolved))
            output, state = gated_delta_step(queries, keys, values, log_decay, strength, cache.recurrent_state)
        return self._output(output.astype(x.dtype), gate, count), RecurrentCache(inputs[:, 1:], state)

    def extend(
        self, x: Float[Array, "T D"], cache: RecurrentCache, cu_seqlens: Int32[Array, " B+1"]
    ) -> tuple[Float[Array, "T D"], RecurrentCache]:
        """The next rows of every request, after those that left `cache`.

        Request r owns rows ``[cu_seqlens[r], cu_seqlens[r+1])``; those from ``cu_seqlens[B]`` on are padding.
        """
        count = cu_seqlens[-1]
        mixed, gate, log_decay, strength = self._project(x, count)
        width = self.shape.conv_width - 1
        with jax.named_scope("causal_conv"):
            # Every request's rows behind the inputs that it left.
            rows, requests = jnp.arange(x.shape[0], dtype=jnp.int32), cache.conv_state.shape[0]
            request = jnp.minimum(request_of_row(cu_seqlens, rows), requests - 1)
            places = rows + (request + 1) * width
            left = cu_seqlens[:-1, None] + jnp.arange(requests, dtype=jnp.int32)[:, None] * width + jnp.arange(width)
            inputs = jnp.zeros((x.shape[0] + requests * width, mixed.shape[1]), mixed.dtype)
            inputs = inputs.at[places].set(mixed, unique_indices=True)
            inputs = inputs.at[left].set(cache.conv_state.astype(mixed.dtype), unique_indices=True)
            convolved = causal_conv(inputs, self._taps(), jnp.zeros(inputs.shape[0], jnp.int32))[places]
            conv_state = inputs[left + jnp.diff(cu_seqlens)[:, None]]
        with jax.named_scope("gated_delta_rule"):
            queries, keys, values = self._split(jax.nn.silu(convolved))
            output, state = _rule(queries, keys, values, log_decay, strength, cu_seqlens, cache.recurrent_state)
        return self._output(output.astype(x.dtype), gate, count), RecurrentCache(conv_state, state)

    def recur_with(
        self,
        x: Float[Array, "T D"],
        row_start: Int32[Array, " T"],
        rule: Callable[[Array, Array, Array, Array, Array], Float[Array, "T Hv dv"]],
    ) -> Float[Array, "T D"]:
        """The mixer with `rule(queries, keys, values, log_decay, strength)` in the gated delta rule's place.

        Row i belongs to the request whose first row is `row_start[i]`.
        """
        mixed, gate, log_decay, strength = self._project(x)
        with jax.named_scope("causal_conv"):
            convolved = causal_conv(mixed, self._taps(), row_start)
        with jax.named_scope("gated_delta_rule"):
            output = rule(*self._split(jax.nn.silu(convolved)), log_decay, strength)
        return self._output(output.astype(x.dtype), gate)

    def _project(
        self, x: Float[Array, "T D"], count: Int32[Array, ""] | None = None
    ) -> tuple[Array, Array, Array, Array]:
        """Convolution inputs [T, channels], output gate [T, Hv, dv], log decay and strength [T, Hv] in float32."""
        shape = self.shape
        ratio = shape.num_value_heads // shape.num_key_heads
        with jax.named_scope("qkvz"):
            projected = project(x, self.in_proj_qkvz, count=count)
            strength_decay = project(x, self.in_proj_ba, count=count)
        key, value = shape.key_head_dim, ratio * shape.value_head_dim
        strength, decay = jnp.split(strength_decay, 2, axis=-1)
        num_rows = x.shape[0]
        mixed = projected[..., : 2 * key + value].reshape(num_rows, -1)
        gate = projected[..., 2 * key + value :].reshape(num_rows, shape.num_value_heads, shape.value_head_dim)
        strength = jax.nn.sigmoid(strength.reshape(num_rows, -1).astype(jnp.float32))
        decay = decay.reshape(num_rows, -1).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)
        log_decay = -jnp.exp(self.a_log[...].astype(jnp.float32)) * jax.nn.softplus(decay)
        return mixed, gate, log_decay, strength

    def _taps(self) -> Float[Array, "width channels"]:
        """The convolution's weights with the channels in key-head groups, as the projection lays out its inputs.

        So shards of whole groups are slices of channels; in a checkpoint they lie queries, keys, values.
        """
        shape = self.shape
        key_dim = shape.num_key_heads * shape.key_head_dim
        parts = jnp.split(self.conv[...], (key_dim, 2 * key_dim), axis=-1)
        groups = [part.reshape(shape.conv_width, shape.num_key_heads, -1) for part in parts]
        return whole(jnp.concatenate(groups, axis=-1).reshape(shape.conv_width, -1))

    def _split(self, convolved: Float[Array, "T channels"]) -> tuple[Array, Array, Array]:
        """Queries and keys [T, Hk, dk] and values [T, Hv, dv], as the convolution left them."""
        shape = self.shape
        groups = convolved.reshape(convolved.shape[0], shape.num_key_heads, -1)
        queries, keys, values = jnp.split(groups, (shape.key_head_dim, 2 * shape.key_head_dim), axis=-1)
        return queries, keys, values.reshape(-1, shape.num_value_heads, shape.value_head_dim)

    def _output(
        self, output: Float[Array, "T Hv dv"], gate: Float[Array, "T Hv dv"], count: Int32[Array, ""] | None = None
    ) -> Float[Array, "T D"]:
        with jax.named_scope("linear_attention_output"):
            return project(self.norm(output, gate), self.out_proj, count=count)


def _rule(
    queries: Float[Array, "T Hk dk"],
    keys: Float[Array, "T Hk dk"],
    values: Float[Array, "T Hv dv"],
    log_decay: Float[Array, "T Hv"],
    strength: Float[Array, "T Hv"],
    cu_seqlens: Int32[Array, " B+1"],
    initial_state: Float[Array, "B Hv dk dv"] | None,
) -> tuple[Float[Array, "T Hv dv"], Float[Array, "B Hv dk dv"]]:
    """The gated delta rule, every shard with its own heads."""

    def on_shard(q: Array, k: Array, v: Array, decay: Array, strength: Array, cu_seqlens: Array, state: Array | None):
        return _shard_rule(q, k, v, decay, strength, cu_seqlens, initial_state=state)

    cut = PartitionSpec(None, TENSOR)
    shards = per_shard(on_shard, (cut,) * 5 + (PartitionSpec(), cut), (cut, cut))
    return shards(queries, keys, values, log_decay, strength, cu_seqlens, initial_state)


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


def _decay_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)
