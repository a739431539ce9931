"""The page of an explanation: heat map, kept share of every segment, the prompt's text with what left dimmed."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool

from uniprefill_jax.explain.colours import STOPS, ColourScale
from uniprefill_jax.explain.gather import NO_BLOCK, Explanation, Mark
from uniprefill_jax.explain.measure import Timing
from uniprefill_jax.pages.rendering import compact_ranges, render_page

FAINTEST_TEXT = 50  # per cent of the ink that text keeps which left at the first drop
MOST_TICKS = 9


@dataclass(frozen=True)
class Provenance:
    """Where an explanation comes from: what a reader needs to make it again."""

    model: str
    command: str
    date: str
    device: str
    versions: dict[str, str]


def explanation_page(
    explanation: Explanation, timing: Timing, provenance: Provenance, marks: Sequence[Mark] = ()
) -> str:
    """The HTML of the page, complete in itself."""
    config = explanation.config
    scale = ColourScale.for_drops(explanation.drops)
    return render_page(
        "explain.html",
        script="explain.js",
        **asdict(provenance),
        num_layers=explanation.num_layers,
        num_tokens=explanation.num_tokens,
        window_tokens=config.window_tokens,
        sink_tokens=config.sink_tokens,
        block_size=config.block_size,
        top_p=config.top_p,
        top_p_percent=f"{100 * config.top_p:g}%",
        over_candidates=config.top_p_over == "candidates",
        carry=config.dropped_tokens == "carry",
        drops=explanation.drops,
        cards=_cards(explanation, timing),
        marks=marks,
        forced=runs(np.asarray([_is_forced(explanation, token) for token in range(explanation.num_tokens)])),
        lanes=_lanes(explanation, scale),
        ticks=_ticks(explanation.num_tokens),
        scale={
            "low": f"{scale.low:.2g}",
            "high": f"{scale.high:.2g}",
            "stops": STOPS,
            "even_percent": 100 * scale.share(1.0),
        },
        segments=_segments(explanation),
        strengths=_strengths(len(explanation.drops)),
        depths=_depths(explanation),
        passages=explanation.passages,
        setting=repr(config),
        timing_note=(
            f"medians of {len(timing.dense)} runs of each method in turns, after a warming run; without compiling."
        ),
        data={
            "drops": [{"layer": drop.layer, "block_mass": drop.block_mass.tolist()} for drop in explanation.drops],
            "passages": [
                {name: value for name, value in asdict(passage).items() if name != "text"}
                for passage in explanation.passages
            ],
        },
    )


def runs(present: Bool[np.ndarray, " tokens"]) -> list[tuple[int, int]]:
    """Where a mask is true, as [start, stop) runs."""
    edges = np.flatnonzero(np.diff(np.r_[False, present, False].astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def segment_label(explanation: Explanation, number: int) -> str:
    """Names the layers of a segment."""
    layers = explanation.segments[number].layers
    if not layers:  # the feed-forward of the layer that dropped is all there is
        return f"rest of layer {explanation.drops[number - 1].layer}"
    return f"layer{'s' if len(layers) > 1 else ''} {compact_ranges(list(layers))}"


def duration(seconds: float) -> str:
    """A time with three significant digits."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def _cards(explanation: Explanation, timing: Timing) -> list[dict[str, str]]:
    tokens = round(explanation.kept_to_the_end * explanation.num_tokens)
    return [
        {
            "title": "Tokens that stayed to the end",
            "value": f"{explanation.kept_to_the_end:.0%}",
            "note": f"{tokens:,} of {explanation.num_tokens:,}",
        },
        {
            "title": "Work that was left",
            "value": f"{explanation.flop_fraction:.0%}",
            "note": "of the operations of a dense read (cost model)",
        },
        {
            "title": "Ideal saving",
            "value": f"{1 / explanation.flop_fraction:.2f}×",
            "note": "faster, if time followed operations",
        },
        {
            "title": "Measured saving",
            "value": f"{timing.speedup:.2f}×",
            "note": f"{duration(timing.dense_seconds)} dense, {duration(timing.dropping_seconds)} dropping",
        },
    ]


def _is_forced(explanation: Explanation, token: int) -> bool:
    config = explanation.config
    return token < config.sink_tokens or token >= explanation.num_tokens - config.window_tokens


def _lanes(explanation: Explanation, scale: ColourScale) -> list[dict[str, Any]]:
    """Rows of the heat map: what the first layers read, then for each drop its scores and what is read after it."""
    lanes = [_strip(explanation, 0)]
    for number, drop in enumerate(explanation.drops):
        relative = drop.relative_mass
        cells = [
            {
                "start": passage.start,
                "stop": passage.stop,
                "fill": scale.colour(float(relative[passage.blocks[number]])),
                "passage": index,
            }
            for index, passage in enumerate(explanation.passages)
            if passage.blocks[number] != NO_BLOCK
        ]
        note = f"{drop.tokens_scored:,} → {drop.tokens_kept:,}"
        lanes += [{"layer": drop.layer, "cells": cells, "note": note}, _strip(explanation, number + 1)]
    return lanes


def _strip(explanation: Explanation, number: int) -> dict[str, Any]:
    segment = explanation.segments[number]
    return {
        "label": segment_label(explanation, number),
        "runs": runs(segment.present),
        "note": f"{segment.fraction:.0%}",
    }


def _ticks(num_tokens: int) -> list[dict[str, Any]]:
    step = 10 ** math.floor(math.log10(max(num_tokens, 1)))
    for divisor in (5, 2, 1):
        if num_tokens * divisor / step <= MOST_TICKS:
            step = step / divisor
            break
    step = max(1, round(step))
    return [{"percent": 100 * at / num_tokens, "label": f"{at:,}"} for at in range(0, num_tokens, step)]


def _segments(explanation: Explanation) -> list[dict[str, Any]]:
    rows = []
    for number, segment in enumerate(explanation.segments):
        before = explanation.drops[number - 1] if number else None
        rows.append(
            {
                "label": segment_label(explanation, number),
                "tokens": segment.tokens,
                "share": f"{segment.fraction:.1%}",
                "percent": 100 * segment.fraction,
                "discarded": "" if before is None else f"{before.discarded_mass:.2%}",
                "margin": "" if before is None or not math.isfinite(before.cut_margin) else f"{before.cut_margin:.1e}",
            }
        )
    return rows


def _strengths(num_drops: int) -> list[int]:
    """Per cent of the ink by the number of drops survived."""
    if not num_drops:
        return [100]
    return [
        round(FAINTEST_TEXT + (100 - FAINTEST_TEXT) * (survived / num_drops) ** 1.5)
        for survived in range(num_drops + 1)
    ]


def _depths(explanation: Explanation) -> list[dict[str, Any]]:
    """What each strength of the text stands for."""
    num_drops = len(explanation.drops)
    if explanation.config.dropped_tokens == "carry":
        labels = [f"stayed after {survived} of {num_drops} layers" for survived in range(num_drops)]
    else:
        labels = [f"left at layer {drop.layer}" for drop in explanation.drops]
    entries = [{"survived": survived, "label": label} for survived, label in enumerate(labels)]
    return [*entries, {"survived": num_drops, "label": "stayed to the end" if num_drops else "all of it stayed"}]
