"""A request's prefill as stages: what runs between two drops, in an order in which each may run chunk by chunk.

A stage is (feed-forward of the last drop layer), whole layers, (mixer of the next drop layer or of the last layer). Its
chunks run one after the other, and only then may the next stage begin: a drop looks at all tokens of its layer.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from uniprefill_jax.cache.pools import attention_layers, linear_layers
from uniprefill_jax.cache.prefix import PrefixShape
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.engine.requests import PartPrice
from uniprefill_jax.models.config import ModelConfig
from uniprefill_jax.models.layer_loop import Grouping, LayerLoop, group_layers
from uniprefill_jax.sparsify.cost import row_flops
from uniprefill_jax.sparsify.drop_layers import segments_of_layers

PART_LAYERS = 4


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        rows: "all" tokens of the prompt, or those that were "kept" by the drop before.
        feed_forward: layer whose feed-forward begins it.
        first: first whole layer.
        count: whole layers.
        last: layer whose mixer ends it. None: the kept rows go back among all rows, where the next stage goes on.
        drops: whether tokens are dropped after it.
    """

    rows: Literal["all", "kept"]
    feed_forward: int | None
    first: int
    count: int
    last: int | None
    drops: bool


@dataclass(frozen=True)
class StageProgram:
    """The static side of a stage: stages that agree in it run one compiled program.

    How many layers it has is static: a loop whose length only the device knows has the host wait in every round.

    Attributes:
        feed_forward: kind of the layer whose feed-forward begins it.
        middle: the whole layers.
        last: kind of the layer whose mixer ends it.
    """

    feed_forward: str | None
    middle: Grouping
    last: str | None


def prefill_stages(model: ModelConfig, config: UniPrefillConfig, drop_layers: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages of a prefill that drops at these layers (rising, none of them the last layer)."""
    ends = (*drop_layers, model.num_layers - 1)
    stages = [Stage("all", None, 0, ends[0], ends[0], bool(drop_layers))]
    for number, (drop, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        drops = number + 2 < len(ends)
        if config.dropped_tokens == "carry" and drops:
            # The next drop layer's mixer sees all tokens again.
            stages.append(Stage("kept", drop, drop + 1, end - drop - 1, None, False))
            stages.append(Stage("all", None, end, 0, end, True))
        else:
            stages.append(Stage("kept", drop, drop + 1, end - drop - 1, end, drops))
    return tuple(stages)


@lru_cache(maxsize=4096)
def stage_parts(model: ModelConfig, stage: Stage) -> tuple[Stage, ...]:
    """A stage in parts of a few layers each, the pieces between which a step may end: every chunk goes through all of
    them before the next one begins.

    They are as long as the model's pattern of layers, or a multiple of that, so that few programs serve them all.
    """
    most = _part_layers(model)
    parts, feed_forward, first, count = [], stage.feed_forward, stage.first, stage.count
    while count + (stage.last is not None) > most:
        parts.append(replace(stage, feed_forward=feed_forward, first=first, count=most, last=None, drops=False))
        feed_forward, first, count = None, first + most, count - most
    return (*parts, replace(stage, feed_forward=feed_forward, first=first, count=count))


def part_price(model: ModelConfig, part: Stage) -> PartPrice:
    """What a row of a part costs, at least as much as one of a whole part: see `PartPrice`."""
    costs = {layer: row_flops(model, layer) for layer in model.layers}
    unit = _part_layers(model) * sum(costs[layer][0] for layer in model.layers) / model.num_layers
    layers = [*range(part.first, part.first + part.count), *([] if part.last is None else [part.last])]
    row, seen = 0.0, dict[int | None, float]()
    for layer in (model.layers[number] for number in layers):
        row += costs[layer][0] / unit
        if costs[layer][1]:
            seen[layer.window] = seen.get(layer.window, 0.0) + costs[layer][1] / unit
    return PartPrice(max(row, 1.0), tuple(seen.items()))


def _part_layers(model: ModelConfig) -> int:
    """Layers of a whole part: the shortest multiple of the repeated pattern that has `PART_LAYERS`."""
    first = group_layers([layer.kind for layer in model.layers])[0]
    pattern = sum(run.count for run in first.body) if isinstance(first, LayerLoop) else 1
    return -(-PART_LAYERS // pattern) * pattern


def segment_layers(
    model: ModelConfig, config: UniPrefillConfig, drop_layers: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """For every segment, its attention layers, numbered among the model's attention layers.

    Segment 0 holds all tokens, segment k what the k-th drop kept. In carry mode every drop layer is of segment 0.
    """
    segments: list[list[int]] = [[] for _ in range(len(drop_layers) + 1)]
    of_layer = segments_of_layers(model, config, drop_layers)
    for number, layer in enumerate(attention_layers(model)):
        segments[of_layer[layer]].append(number)
    return tuple(map(tuple, segments))


def prefix_shape(model: ModelConfig, config: UniPrefillConfig, drop_layers: tuple[int, ...]) -> PrefixShape:
    """What of such a prefill depends on the tokens alone: all up to the mixer of the first drop layer."""
    attention, linear = attention_layers(model), linear_layers(model)
    if not drop_layers:
        return PrefixShape(len(attention), len(linear), None, 1)
    first = drop_layers[0]
    before = sum(layer <= first for layer in attention), sum(layer < first for layer in linear)
    return PrefixShape(*before, first, config.window_tokens)


@lru_cache(maxsize=4096)
def stage_program(model: ModelConfig, stage: Stage) -> StageProgram:
    """The program that runs a stage."""
    kinds = [layer.kind for layer in model.layers]
    feed_forward = None if stage.feed_forward is None else kinds[stage.feed_forward]
    last = None if stage.last is None else kinds[stage.last]
    return StageProgram(feed_forward, group_layers(kinds[stage.first : stage.first + stage.count]), last)
