"""The heat map of an explanation as a picture, with matplotlib (the extra `plots`)."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from uniprefill_jax.explain.colours import STOPS, ColourScale
from uniprefill_jax.explain.gather import NO_BLOCK, Explanation, Mark
from uniprefill_jax.explain.measure import Timing
from uniprefill_jax.explain.page import duration, runs, segment_label

SCORES_HEIGHT, STRIP_HEIGHT, GAP = 1.0, 0.35, 0.12
MARKS_HEIGHT = 0.6
PRESENT, GONE, MARK = "#7d8794", "#eceae4", "#b3470b"
INCHES_WIDE, INCHES_OF_HEIGHT_ONE = 11.0, 0.42
DOTS_PER_INCH = 150


def save_picture(path: Path, explanation: Explanation, timing: Timing, model: str, marks: Sequence[Mark] = ()) -> None:
    """Write the heat map as PNG: scores at each drop layer, and below each what the next layers still read."""
    scale = ColourScale.for_drops(explanation.drops)
    num_drops = len(explanation.drops)
    height = num_drops * (SCORES_HEIGHT + GAP) + (num_drops + 1) * (STRIP_HEIGHT + GAP)
    figure = Figure(figsize=(INCHES_WIDE, 1.8 + INCHES_OF_HEIGHT_ONE * height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlim(0, explanation.num_tokens)
    axes.set_ylim(height, -MARKS_HEIGHT if marks else 0)
    for mark in marks:
        axes.annotate(
            f"▼ {mark.label}", ((mark.start + mark.stop) / 2, 0), color=MARK, fontsize=9, ha="left", va="bottom"
        )
    labels, centres, top = [], [], 0.0

    def lane(label: str, lane_height: float, ranges: list[tuple[int, int]], colours: list[str] | str) -> None:
        nonlocal top
        axes.broken_barh([(0, explanation.num_tokens)], (top, lane_height), facecolors=GONE)
        widths = [(start, stop - start) for start, stop in ranges]
        axes.broken_barh(widths, (top, lane_height), facecolors=colours, linewidth=0, antialiased=False)
        labels.append(label)
        centres.append(top + lane_height / 2)
        top += lane_height + GAP

    def strip(number: int) -> None:
        segment = explanation.segments[number]
        label = f"{segment_label(explanation, number)}: {segment.fraction:.0%}"
        lane(label, STRIP_HEIGHT, runs(segment.present), PRESENT)

    strip(0)
    for number, drop in enumerate(explanation.drops):
        scored = [passage for passage in explanation.passages if passage.blocks[number] != NO_BLOCK]
        relative = drop.relative_mass
        lane(
            f"scores, layer {drop.layer}",
            SCORES_HEIGHT,
            [(passage.start, passage.stop) for passage in scored],
            [scale.colour(float(relative[passage.blocks[number]])) for passage in scored],
        )
        strip(number + 1)
    axes.set_yticks(centres, labels)
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.set_xlabel("token of the prompt")
    axes.set_title(
        f"{model}: {explanation.kept_to_the_end:.0%} of {explanation.num_tokens:,} tokens stay to the end; "
        f"{1 / explanation.flop_fraction:.2f}x ideal, {timing.speedup:.2f}x measured "
        f"({duration(timing.dense_seconds)} dense, {duration(timing.dropping_seconds)} dropping)",
        fontsize=10,
        loc="left",
    )
    if explanation.drops:
        colours = ScalarMappable(LogNorm(scale.low, scale.high), LinearSegmentedColormap.from_list("scores", STOPS))
        bar = figure.colorbar(colours, ax=axes, label="score of a block, times an even share", pad=0.01, fraction=0.03)
        bar.ax.yaxis.set_major_formatter("{x:g}")
    figure.savefig(path, format="png")
