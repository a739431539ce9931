"""Accuracy against operations of whole models: what each setting scores over all lengths, and which none beats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from uniprefill_jax.bench.plots import Panel, Series

AVERAGE = "average"


@dataclass(frozen=True)
class Point:
    """A setting over a model's lengths.

    Attributes:
        config: the setting.
        flop_fraction: operations over dense's.
        score: points, each length with the same weight.
    """

    config: str
    flop_fraction: float
    score: float


def frontier_panels(rows: Sequence[Mapping[str, Any]], source: str) -> list[Panel]:
    """One panel per model and harness of a file: its settings by family, and their frontier.

    Models without an average over tasks, or with dense alone, have none. `source`, the file, is in the title: scores of
    two files are of different prompts.
    """
    models: dict[tuple[str, Any], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["task"] == AVERAGE:
            models.setdefault((row["model"], row.get("harness")), []).append(row)
    panels = []
    for (model, _), own in models.items():
        points = points_of(own)
        if len({point.flop_fraction for point in points}) < 2:
            continue
        families: dict[str, list[Point]] = {}
        for point in points:
            families.setdefault(family(point.config), []).append(point)
        series = [_line(name, number, of_family) for number, (name, of_family) in enumerate(families.items())]
        series.append(_line("", len(families), frontier(points), dashed=True))
        lengths = ", ".join(f"{length:,}" for length in sorted({row["length"] for row in own}))
        panels.append(
            Panel(
                f"{model}: {lengths} tokens ({source})",
                "operations, of dense",
                "score",
                series,
                dashed_means="frontier",
                share_x=True,
            )
        )
    return panels


def points_of(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """A model's settings over its lengths; those that were not asked at every length are left out."""
    lengths = {row["length"] for row in rows}
    settings: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        settings.setdefault(row["config"], {})[row["length"]] = row
    return [
        Point(config, fmean(row["flop_fraction"] for row in own.values()), fmean(row["score"] for row in own.values()))
        for config, own in settings.items()
        if own.keys() == lengths
    ]


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points, by rising operations, each of which scores more than every one with as many operations or fewer."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.flop_fraction, -point.score)):
        if not best or point.score > best[-1].score:
            best.append(point)
    return best


def family(config: str) -> str:
    """A setting without its top_p."""
    parts = [part for part in config.split(",") if not part.strip().startswith("top_p=")]
    return ",".join(parts) or "default"


def _line(label: str, colour: int, points: Sequence[Point], dashed: bool = False) -> Series:
    rising = sorted(points, key=lambda point: point.flop_fraction)
    return Series(label, [point.flop_fraction for point in rising], [point.score for point in rising], colour, dashed)
