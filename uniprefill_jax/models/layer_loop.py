"""Layers in loops: a long stack of layers becomes a few (nested) loops, so compile time does not grow with depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

LayerIndex = Int32[Array, ""] | int


@dataclass(frozen=True)
class LayerRun:
    """`count` neighbouring layers of one kind."""

    kind: str
    count: int

    @property
    def num_layers(self) -> int:
        """Layers covered."""
        return self.count


@dataclass(frozen=True)
class LayerLoop:
    """A pattern of runs, repeated."""

    body: tuple[LayerRun, ...]
    count: int

    @property
    def num_layers(self) -> int:
        """Layers covered."""
        return self.count * sum(run.count for run in self.body)


Grouping = tuple[LayerRun | LayerLoop, ...]


def group_layers(kinds: Sequence[str]) -> Grouping:
    """Fold a list of layer kinds into runs and repeated patterns, e.g. five sliding and one full, seven times."""
    runs = [LayerRun(kind, len(list(group))) for kind, group in groupby(kinds)]
    grouping: list[LayerRun | LayerLoop] = []
    at = 0
    while at < len(runs):
        best_period, best_count = 1, 1
        for period in range(1, (len(runs) - at) // 2 + 1):
            pattern = runs[at : at + period]
            count = 1
            while runs[at + count * period : at + (count + 1) * period] == pattern:
                count += 1
            if count > 1 and period * count > best_period * best_count:
                best_period, best_count = period, count
        if best_count > 1:
            grouping.append(LayerLoop(tuple(runs[at : at + best_period]), best_count))
        else:
            grouping.append(runs[at])
        at += best_period * best_count
    return tuple(grouping)


def loop_layers[Carry](
    grouping: Grouping,
    first: LayerIndex,
    body: Callable[[str, LayerIndex, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Run `body(kind, layer, carry)` over consecutive layers from `first` (which may be traced)."""
    layer = first
    for item in grouping:
        if isinstance(item, LayerRun):
            carry = loop_run(item.kind, layer, item.count, body, carry)
        else:

            def repeat(number: LayerIndex, carry: Carry, start: LayerIndex = layer, item: LayerLoop = item) -> Carry:
                return loop_layers(item.body, start + number * (item.num_layers // item.count), body, carry)

            carry = jax.lax.fori_loop(0, item.count, repeat, carry)
        layer = layer + item.num_layers
    return carry


def loop_run[Carry](
    kind: str,
    first: LayerIndex,
    count: LayerIndex,
    body: Callable[[str, LayerIndex, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Run `body` over `count` (which may be traced) layers of one kind."""
    if isinstance(count, int) and count == 1:
        return body(kind, first, carry)
    return jax.lax.fori_loop(0, count, lambda number, inner: body(kind, first + number, inner), carry)


def index_table(kinds: Sequence[str]) -> Int32[Array, " layers"]:
    """For every layer, its index among the layers of its kind."""
    seen: dict[str, int] = {}
    table = []
    for kind in kinds:
        table.append(seen.get(kind, 0))
        seen[kind] = table[-1] + 1
    return jnp.asarray(table, jnp.int32)
