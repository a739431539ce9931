"""Plots of result rows as inline SVG, with matplotlib (the extra `plots`)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

# Okabe and Ito's colours, told apart by every kind of colour vision and visible on light and dark pages, and a grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
MARKERS = "osD^vPX"
INK = "#123456"  # stands for the page's own text colour, which depends on its scheme
PANEL_WIDTH, LINES_HEIGHT, BAR_HEIGHT = 5.2, 4.1, 0.38  # inches
WIDE_LABEL = 18  # characters from which the legend has two columns, not three
REMS_PER_INCH = 6.5


@dataclass(frozen=True)
class Series:
    """One line: values over rising x. Lines of one `colour` number have one label and belong together."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; series that have but a single x among them become bars.

    Attributes:
        title: what is plotted.
        x_label, y_label: what the axes count, with units.
        series: the lines.
        dashed_means: what dashed lines are, for the legend.
        log_y: whether the y axis is logarithmic; otherwise it begins at 0.
        percent: whether y is a share, shown in per cent, and 1 is a limit to be drawn.
        share_x: whether x is a share up to 1, shown in per cent, and not a count that doubles.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    dashed_means: str = ""
    log_y: bool = False
    percent: bool = False
    share_x: bool = False

    @property
    def x_values(self) -> list[float]:
        """Every x of its series, rising."""
        return sorted({x for series in self.series for x in series.x})


def draw(panels: Sequence[Panel], name: str) -> str:
    """The panels side by side as one <svg> element; `name`, unique in a page, keeps the ids of its parts apart."""
    settings = {
        "svg.fonttype": "none",  # text stays text: it can be searched, read aloud, and takes the page's colour
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with rc_context(settings):  # pyright: ignore[reportArgumentType]
        has_lines = any(len(panel.x_values) > 1 for panel in panels)
        height = LINES_HEIGHT if has_lines else 1.0 + BAR_HEIGHT * max(len(panel.series) for panel in panels)
        figure = Figure(figsize=(PANEL_WIDTH * max(len(panels), 2), height), layout="constrained")
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure)
        # One panel alone leaves the other half of the row free.
        grid = figure.subplots(1, max(len(panels), 2), squeeze=False)[0]
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        written = StringIO()
        # Without these no metadata is written, which would name addresses.
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    # The size in points gives way to the page's width.
    opening = (
        rf'<svg viewBox="\1" style="width: 100%; max-width: {figure.get_figwidth() * REMS_PER_INCH:.0f}rem" role="img">'
    )
    return re.sub(r'<svg[^>]* viewBox="([^"]+)"[^>]*>', opening, svg, count=1)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.patch.set_alpha(0)
    axes.spines[["right", "top"]].set_visible(False)
    axes.set_title(panel.title, fontsize=10, loc="left")
    if len(panel.x_values) == 1:
        _draw_bars(axes, panel)
    else:
        _draw_lines(axes, panel)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    labels = [f"{series.label}, {panel.dashed_means}" if series.dashed else series.label for series in panel.series]
    values = [series.y[0] for series in panel.series]
    bars = axes.barh(labels, values, color=[COLOURS[series.colour % len(COLOURS)] for series in panel.series])
    for bar, series in zip(bars, panel.series, strict=True):
        bar.set_alpha(0.45 if series.dashed else 1.0)
    axes.bar_label(bars, [_bar_label(value, panel.percent) for value in values], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    if panel.percent:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_xlabel(f"{panel.y_label} ({panel.x_label}: {short_count(panel.x_values[0])})")


def _bar_label(value: float, percent: bool) -> str:
    if percent:
        return f"{value:.1%}"
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _draw_lines(axes: Axes, panel: Panel) -> None:
    for series in panel.series:
        axes.plot(
            series.x,
            series.y,
            label="_" if series.dashed else series.label,  # matplotlib leaves such labels out of the legend
            color=COLOURS[series.colour % len(COLOURS)],
            marker=MARKERS[series.colour % len(MARKERS)],
            markersize=4,
            linewidth=1.2,
            linestyle="--" if series.dashed else "-",
            markerfacecolor="none" if series.dashed else None,
        )
    if panel.share_x:
        axes.set_xlim(0, 1.05)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(panel.x_values)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
        axes.xaxis.set_minor_locator(NullLocator())
    largest = max(y for series in panel.series for y in series.y)
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    else:
        axes.set_ylim(0, 1.1 * max(largest, 1.0 if panel.percent else 0.0))
    if panel.percent:
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.grid(axis="y", alpha=0.2)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.dashed_means and any(series.dashed for series in panel.series):
        axes.plot([], [], color=INK, linestyle="--", linewidth=1.2, label=panel.dashed_means)
    columns = 3 if max(len(series.label) for series in panel.series) < WIDE_LABEL else 2
    axes.legend(fontsize=8, frameon=False, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def short_count(value: float) -> str:
    """A number of tokens or prompts: 131072 is 128K."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
