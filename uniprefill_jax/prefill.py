"""The fused prefill: all layers, all drops and the last token's logits of a ragged batch in one jit, no host read.

Layers are grouped into segments. A segment after a drop begins with the drop layer's feed-forward and ends with the
mixer of the next drop layer (or of the last layer): tokens leave between attention and feed-forward. How many tokens
are left is known on the device only, so such a segment is a `lax.switch` over a ladder of static lengths; segments of
one shape share a scan and compile once per rung.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.attention import AttentionCache
from uniprefill_jax.models.batch import PackedRows, PackingRules, last_rows, pack_rows, request_of_row
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import ModelConfig
from uniprefill_jax.models.gated_delta_net import RecurrentCache
from uniprefill_jax.models.layer_loop import Grouping, LayerRun, group_layers, index_table, loop_layers, loop_run
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.sparsify.drop import Drop, DropInputs, choose_tokens, compact
from uniprefill_jax.sparsify.methods.compression import compress_caches
from uniprefill_jax.sparsify.methods.observed import OBSERVED, Observed, nothing_observed, observe

_Closing = Literal["mixer", "nothing", "last_rows"]  # what follows the whole layers of a segment
LayerCaches = dict[str, AttentionCache | RecurrentCache | Observed]


@struct.dataclass
class SegmentRows:
    """Rows of every segment, stacked: original positions and cumulative lengths."""

    positions: Int32[Array, "segments T"]
    cu_seqlens: Int32[Array, "segments B+1"]


class DropReport(NamedTuple):
    """What every drop decided, stacked over the drop layers."""

    block_mass: Float[Array, "drops B num_blocks"]
    cut_margin: Float[Array, "drops B"]
    discarded_mass: Float[Array, "drops B"]


class PrefillOutput(NamedTuple):
    """Logits of each request's last token, the caches by layer kind, what was dropped (None when dense), and the share
    of full attention that each of the plan's `sparse_layers` computed (None without any)."""

    logits: Float[Array, "B vocab"]
    caches: LayerCaches
    segments: SegmentRows
    drops: DropReport | None
    computed: Float[Array, "sparse_layers B"] | None = None


@dataclass(frozen=True)
class _Segment:
    """Layers after a drop: feed-forward of `drop`, whole layers up to `last`, mixer of `last`."""

    drop: int
    last: int

    def middle(self, model: ModelConfig) -> Grouping:
        """The whole layers between."""
        return group_layers([model.layers[layer].kind for layer in range(self.drop + 1, self.last)])

    def is_uniform(self, model: ModelConfig) -> bool:
        """Whether all its layers are of one kind."""
        return len({model.layers[layer].kind for layer in range(self.drop, self.last + 1)}) == 1

    def shape(self, model: ModelConfig) -> tuple[object, ...]:
        """Segments of equal shape run the same program; a single run of layers may be of any length."""
        if self.is_uniform(model):
            return (model.layers[self.drop].kind,)
        middle = self.middle(model)
        single = middle[0].kind if len(middle) == 1 and isinstance(middle[0], LayerRun) else middle
        return model.layers[self.drop].kind, single, model.layers[self.last].kind


class _SegmentState(NamedTuple):
    """What flows from one drop to the next: all rows in hand, their bookkeeping, caches, and the drop layer's view."""

    x: Float[Array, "T D"]
    positions: Int32[Array, " T"]
    cu_seqlens: Int32[Array, " B+1"]
    token_scores: Float[Array, " T"]
    caches: LayerCaches
    queries: Float[Array, "B n H d"]


def prefill(
    plan: PrefillPlan,
    model: CausalLM,
    tokens: Int32[Array, " T"],
    cu_seqlens: Int32[Array, " B+1"],
    top_p: Float[Array, ""],
    score_memory: Float[Array, ""],
) -> PrefillOutput:
    """Prefill a packed batch (notes: algorithm; design, "The idea that makes it fast").

    `top_p` and `score_memory` are traced: other values do not recompile. Padding rows must hold a valid token id.
    """
    return _Prefill(plan, model)(tokens, cu_seqlens, top_p, score_memory)


class _Prefill:
    """One trace of the prefill; methods are its steps, in order."""

    def __init__(self, plan: PrefillPlan, model: CausalLM):
        self.plan = plan
        self.model = model
        self.config = plan.model
        self.kinds = [layer.kind for layer in plan.model.layers]
        self.table = index_table(self.kinds)
        self.full_table = index_table(["full" if layer.mixer == "full" else "other" for layer in plan.model.layers])
        config, chunk = plan.config, plan.row_chunk
        self.rules = PackingRules.of(plan.model, config.sliding_window, chunk, plan.execution, plan.attention)

    def __call__(
        self,
        tokens: Int32[Array, " T"],
        cu_seqlens: Int32[Array, " B+1"],
        top_p: Float[Array, ""],
        score_memory: Float[Array, ""],
    ) -> PrefillOutput:
        plan = self.plan
        self.prompt_lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        rows = jnp.arange(plan.num_rows, dtype=jnp.int32)
        starts = cu_seqlens[jnp.minimum(request_of_row(cu_seqlens, rows), plan.num_requests - 1)]
        positions = jnp.where(rows < cu_seqlens[-1], rows - starts, 0)
        packed = pack_rows(positions, cu_seqlens, self.rules)
        x = self.model.embed(tokens)
        ends = (*plan.drop_layers, self.config.num_layers - 1)
        grouping = group_layers(self.kinds[: ends[0]])
        x, caches = loop_layers(grouping, 0, self._whole_layer(packed), (x, self._empty_caches(x.dtype)))
        segments = SegmentRows(positions[None], cu_seqlens[None])
        report = None
        if not plan.drop_layers:
            last, caches = self._mix_last(x, packed, caches)
        else:
            x, caches, queries = self._mix(self.kinds[ends[0]], ends[0], x, packed, caches)
            state = _SegmentState(
                x, positions, cu_seqlens, jnp.zeros(plan.num_rows, jnp.float32), caches, self._window(queries, packed)
            )
            state, rest, report = self._after_drops(state, packed, top_p, score_memory)
            last, caches = state.x, state.caches
            segments = jax.tree.map(lambda first, later: jnp.concatenate([first, later]), segments, rest)
        last = self._layer(self.kinds[-1], self.config.num_layers - 1).transform(last)
        computed = None
        if self._observes:
            observed = caches.pop(OBSERVED)
            assert isinstance(observed, Observed)
            if observed.computed is not None:
                computed = observed.computed[: len(plan.sparse_layers)]
            if plan.compression is not None:
                assert observed.queries is not None
                entered = segments.cu_seqlens[jnp.asarray(plan.segment_of_layer)]
                caches = compress_caches(plan.compression, self.config, caches, observed.queries, entered)
        return PrefillOutput(self.model.logits(last), caches, segments, report, computed)

    def _after_drops(
        self, state: _SegmentState, full: PackedRows, top_p: Float[Array, ""], score_memory: Float[Array, ""]
    ) -> tuple[_SegmentState, SegmentRows, DropReport]:
        """Every drop and the segment after it; neighbouring segments of one shape share a scan."""
        drops = self.plan.drop_layers
        ends = (*drops[1:], self.config.num_layers - 1)
        numbered = [(number, _Segment(drop, last)) for number, (drop, last) in enumerate(zip(drops, ends, strict=True))]
        carrying = self.plan.config.dropped_tokens == "carry"

        def shape(item: tuple[int, _Segment]) -> tuple[object, ...]:
            number, segment = item
            span = None if self._loops_are_free else segment.last - segment.drop
            return (*segment.shape(self.config), span, number + 1 < len(drops))

        outputs = []
        for _, group in groupby(numbered, key=shape):
            members = list(group)
            numbers = [number for number, _ in members]
            example = members[0][1]
            # In carry mode a later drop layer's mixer runs on all rows, the last layer's on kept rows only.
            full_rows = full if carrying and numbers[-1] + 1 < len(drops) else None
            step = partial(self._drop_and_run, example, full_rows, top_p, score_memory)
            bounds = jnp.asarray([[s.drop, s.last, int(n > 0)] for n, s in members], jnp.int32)
            if len(members) == 1:
                state, output = step(state, bounds[0])
                output = jax.tree.map(lambda array: array[None], output)
            else:
                state, output = jax.lax.scan(step, state, bounds)
            outputs.append(output)
        rows, report = jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
        return state, rows, report

    def _drop_and_run(
        self,
        example: _Segment,
        full_rows: PackedRows | None,
        top_p: Float[Array, ""],
        score_memory: Float[Array, ""],
        state: _SegmentState,
        bounds: Int32[Array, "3"],
    ) -> tuple[_SegmentState, tuple[SegmentRows, DropReport]]:
        """One drop, then the layers up to the next.

        `full_rows` are all rows, where the next drop layer's mixer runs on them (carry mode). `bounds` holds the drop
        layer, the last layer, and whether scores are carried.
        """
        plan, kind = self.plan, self.kinds[example.drop]
        drop_layer, last_layer, has_memory = bounds[0], bounds[1], bounds[2]
        cache = state.caches[kind]
        assert isinstance(cache, AttentionCache)
        keys = jax.lax.dynamic_index_in_dim(cache.keys, self.table[drop_layer], 0, keepdims=False)
        inputs = DropInputs(state.queries, keys, state.cu_seqlens, state.token_scores)
        drop = self._choose(inputs, drop_layer, top_p, score_memory * has_memory)
        x, positions, token_scores = compact((state.x, state.positions, drop.token_scores), drop)
        segment = SegmentRows(positions, drop.cu_seqlens)
        rung = jnp.searchsorted(jnp.asarray(plan.ladder, jnp.int32), drop.cu_seqlens[-1], method="compare_all")
        closing: _Closing = "last_rows" if self._is_final(example) else "nothing" if full_rows is not None else "mixer"
        branches = [partial(self._run_segment, example, length, closing) for length in plan.ladder]
        # Whatever can be worked out before the switch is: after it a GPU's host has to catch up, launch by launch.
        packed = pack_rows(positions, drop.cu_seqlens, self.rules)
        operands = (x, packed, state.caches, state.queries, drop_layer, last_layer)
        x, caches, queries = jax.lax.switch(rung, branches, *operands)
        if full_rows is None:
            after = _SegmentState(x, positions, drop.cu_seqlens, token_scores, caches, queries)
        else:
            x = state.x.at[drop.indices].set(x, mode="drop")
            x, caches, queries = self._mix(self.kinds[example.last], last_layer, x, full_rows, caches)
            window = self._window(queries, full_rows)
            after = _SegmentState(x, state.positions, state.cu_seqlens, drop.token_scores, caches, window)
        return after, (segment, _report(drop))

    def _choose(
        self,
        inputs: DropInputs,
        drop_layer: Int32[Array, ""],
        top_p: Float[Array, ""],
        memory: Float[Array, ""],
    ) -> Drop:
        """Which rows stay after a drop layer: those of the setting's rule, or those that the method chooses."""
        plan, scale = self.plan, self.config.attention_scale
        if plan.tokens is None:
            config = plan.config
            return choose_tokens(inputs, config, top_p=top_p, memory=memory, scale=scale, num_blocks=plan.num_blocks)
        drops = jnp.asarray(plan.drop_layers, jnp.int32)
        return plan.tokens.choose(
            inputs,
            self.prompt_lengths,
            jnp.searchsorted(drops, drop_layer),
            num_drops=len(plan.drop_layers),
            scale=scale,
            num_blocks=plan.num_blocks,
        )

    def _run_segment(
        self,
        example: _Segment,
        length: int,
        closing: _Closing,
        x: Float[Array, "T D"],
        packed: PackedRows,
        caches: LayerCaches,
        queries: Float[Array, "B n H d"],
        drop_layer: Int32[Array, ""],
        last_layer: Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"] | Float[Array, "B D"], LayerCaches, Float[Array, "B n H d"]]:
        """The layers of one segment at one rung of the ladder, and at its end what `closing` says."""
        packed, kept = packed.first(length), x[:length]
        if closing == "mixer" and example.is_uniform(self.config):

            def feed_forward_then_mix(kind: str, layer: Array | int, carry: tuple[Array, LayerCaches, Array]):
                x, caches, _ = carry
                x = self._transform(kind, layer - 1, x, packed)
                x, caches, queries = self._mix(kind, layer, x, packed, caches)
                return x, caches, self._window(queries, packed)

            count = self._span(example, drop_layer, last_layer)
            carry = (kept, caches, queries)
            kept, caches, queries = loop_run(
                self.kinds[example.drop], drop_layer + 1, count, feed_forward_then_mix, carry
            )
        else:
            kept = self._transform(self.kinds[example.drop], drop_layer, kept, packed)
            body, middle = self._whole_layer(packed), example.middle(self.config)
            if example.is_uniform(self.config) or (len(middle) == 1 and isinstance(middle[0], LayerRun)):
                count = self._span(example, drop_layer, last_layer) - 1
                kind = self.kinds[example.last - 1]
                kept, caches = loop_run(kind, drop_layer + 1, count, body, (kept, caches))
            else:
                kept, caches = loop_layers(middle, drop_layer + 1, body, (kept, caches))
            if closing == "last_rows":
                last, caches = self._mix_last(kept, packed, caches)
                return last, caches, queries
            if closing == "mixer":
                kept, caches, scoring = self._mix(self.kinds[example.last], last_layer, kept, packed, caches)
                queries = self._window(scoring, packed)
        return jnp.pad(kept, ((0, x.shape[0] - length), (0, 0))), caches, queries

    def _is_final(self, segment: _Segment) -> bool:
        """Whether the segment ends with the model's last layer, of which only each request's last row is needed."""
        return segment.last == self.config.num_layers - 1

    @property
    def _loops_are_free(self) -> bool:
        """Whether loops of traced length cost nothing: on a CPU; a GPU's host waits for the length at every turn."""
        return self.plan.row_chunk is not None

    def _span(self, example: _Segment, drop_layer: Array, last_layer: Array) -> Int32[Array, ""] | int:
        """Layers from a drop to the end of its segment: static where every segment of the group has as many."""
        return last_layer - drop_layer if self._loops_are_free else example.last - example.drop

    def _whole_layer(self, packed: PackedRows) -> Callable:
        def body(kind: str, layer: Int32[Array, ""] | int, carry: tuple[Array, LayerCaches]):
            x, caches = carry
            x, caches, _ = self._mix(kind, layer, x, packed, caches)
            return self._transform(kind, layer, x, packed), caches

        return body

    def _mix(
        self,
        kind: str,
        layer: Int32[Array, ""] | int,
        x: Float[Array, "rows D"],
        packed: PackedRows,
        caches: LayerCaches,
    ) -> tuple[Float[Array, "rows D"], LayerCaches, Float[Array, "rows H d"] | None]:
        """A layer's mixer; its cache is written."""
        x, cache, attended = self._layer(kind, layer).mix(x, packed)
        caches = self._keep(kind, layer, cache, caches)
        if attended is None:
            return x, caches, None
        if self._observes and self._is_full(kind):
            queries = None
            if self.plan.compression is not None:
                queries = attended.queries[last_rows(packed.cu_seqlens, self.plan.compression.observed)]
            caches = self._observe(layer, Observed(queries, attended.computed), caches)
        return x, caches, attended.queries

    def _mix_last(
        self, x: Float[Array, "rows D"], packed: PackedRows, caches: LayerCaches
    ) -> tuple[Float[Array, "B D"], LayerCaches]:
        """The last layer's mixer, for each request's last row; only that needs the last feed-forward and the head."""
        kind, layer = self.kinds[-1], self.config.num_layers - 1
        last, cache = self._layer(kind, layer).mix_last(x, packed)
        caches = self._keep(kind, layer, cache, caches)
        if self.plan.compression is not None and self._is_full(kind):
            queries = self._layer(kind, layer).window_queries(x, packed, self.plan.compression.observed)
            caches = self._observe(layer, Observed(queries, None), caches)
        return last, caches

    @property
    def _observes(self) -> bool:
        """Whether a method wants to know of full-attention layers after them."""
        return self.plan.attention is not None or self.plan.compression is not None

    def _is_full(self, kind: str) -> bool:
        return self.config.layers[self.kinds.index(kind)].mixer == "full"

    def _observe(self, layer: Int32[Array, ""] | int, new: Observed, caches: LayerCaches) -> LayerCaches:
        """What was seen of a layer, written beside the caches."""
        seen = caches[OBSERVED]
        assert isinstance(seen, Observed)
        return {**caches, OBSERVED: observe(seen, new, self.full_table[layer])}

    def _keep(
        self, kind: str, layer: Int32[Array, ""] | int, cache: AttentionCache | RecurrentCache, caches: LayerCaches
    ) -> LayerCaches:
        """A layer's cache, written into the stack of its kind in place."""
        at = self.table[layer]

        def write(stack: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice(stack, new[None].astype(stack.dtype), (at,) + (0,) * new.ndim)

        with jax.named_scope("cache_write"):
            return {**caches, kind: jax.tree.map(write, caches[kind], cache)}

    def _transform(self, kind: str, layer: Array | int, x: Float[Array, "rows D"], packed: PackedRows) -> Array:
        """A layer's feed-forward."""
        module = self._layer(kind, layer)
        return packed.map_rows(lambda part: module.transform(part, packed.kernel_count), x)

    def _layer(self, kind: str, layer: Int32[Array, ""] | int):
        return self.model.layer(kind, self.table[layer])

    def _window(self, queries: Float[Array, "rows H d"] | None, packed: PackedRows) -> Float[Array, "B n H d"]:
        """Each request's last queries; a drop layer's mixer is attention, so there are some."""
        assert queries is not None
        return queries[last_rows(packed.cu_seqlens, self.plan.config.window_tokens)]

    def _empty_caches(self, dtype: jnp.dtype) -> LayerCaches:
        config, plan = self.config, self.plan
        caches: LayerCaches = {}
        if self._observes:
            seen = nothing_observed(config, plan.num_requests, dtype, plan.attention, plan.compression)
            caches[OBSERVED] = seen
        for kind in config.kinds:
            layers = config.layers_of_kind(kind)
            linear = config.gated_delta_net
            if config.layers[layers[0]].mixer == "linear" and linear is not None:
                state = (linear.num_value_heads, linear.key_head_dim, linear.value_head_dim)
                caches[kind] = RecurrentCache(
                    jnp.zeros((len(layers), plan.num_requests, linear.conv_width - 1, linear.conv_channels), dtype),
                    jnp.zeros((len(layers), plan.num_requests, *state), jnp.float32),
                )
            else:
                shape = (len(layers), plan.num_rows, config.num_kv_heads, config.head_dim)
                caches[kind] = AttentionCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        return caches


def _report(drop: Drop) -> DropReport:
    return DropReport(drop.block_mass, drop.cut_margin, drop.discarded_mass)
