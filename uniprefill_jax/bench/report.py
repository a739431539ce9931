"""One page with the plots and tables of all result files of a folder."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uniprefill_jax.bench.frontier import family, frontier_panels
from uniprefill_jax.bench.plots import Panel, Series, draw
from uniprefill_jax.bench.result_files import ResultFile, Row, Unreadable, read_folder
from uniprefill_jax.errors import InputError
from uniprefill_jax.pages.rendering import render_page

PANELS_IN_A_ROW = 2
PLAIN_BACKEND = "reference"


@dataclass(frozen=True)
class Table:
    """Rows as they are in the file, numbers to six digits."""

    headings: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class ReportFigure:
    """What belongs together under one caption.

    Attributes:
        title: what was measured.
        note: how to read it.
        svgs: the plots; none where the rows are shown as a table only.
        table: the rows behind the plots; None where other figures show them.
        files: where they come from.
    """

    title: str
    note: str
    svgs: list[str]
    table: Table | None
    files: tuple[ResultFile, ...]


def build_report(folder: Path) -> tuple[str, list[Unreadable]]:
    """The page's HTML, and what in the folder could not be shown, which the page names as well.

    Raises:
        InputError: nothing in the folder can be shown.
    """
    files, unreadable = read_folder(folder)
    if not files:
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in unreadable)
        raise InputError(f"no file in {folder} can be shown ({reasons})")
    figures = [
        figure for kind, build in BUILDERS.items() for file in files if kind in file.rows for figure in build(file)
    ]
    figures += _frontier([file for file in files if "accuracy" in file.rows])
    return render_page("report.html", figures=figures, files=files, unreadable=unreadable), unreadable


def _ttft(file: ResultFile) -> Iterable[ReportFigure]:
    for (arch, batch, dtype), rows in _grouped(file.rows["ttft"], "arch", "batch", "dtype"):
        labels = list(dict.fromkeys(map(_method, rows)))
        rival = [row for row in rows if row.get("hf_ttft_ms") is not None]
        times = [
            _series(label, number, [row for row in rows if _method(row) == label], "n", "ttft_ms")
            for number, label in enumerate(labels)
        ]
        if rival:
            times.insert(0, _series("transformers", len(labels), rival, "n", "hf_ttft_ms"))
        gains = []
        for number, label in enumerate(labels):
            own = [row for row in rows if _method(row) == label and row.get("speedup") and row["method"] != "dense"]
            if own:
                gains.append(_series(label, number, own, "n", "speedup"))
                gains.append(_series(label, number, own, "n", "ideal_speedup", dashed=True))
        panels = [Panel("Time to the first token", "prompt tokens", "milliseconds", times, log_y=True)]
        if gains:
            title = "Speed-up over dense, measured beside ideal"
            panels.append(Panel(title, "prompt tokens", "times faster", gains, dashed_means="ideal"))
        yield ReportFigure(
            f"Time to the first token: {arch}, {dtype or 'dtype not named'}, {_prompts(batch)}",
            "Medians. Ideal is the cost model's speed-up on the same kept tokens.",
            _draw(panels, f"{file.name} ttft {arch} {batch} {dtype}"),
            _table(rows),
            (file,),
        )


def _throughput(file: ResultFile) -> Iterable[ReportFigure]:
    for (arch, length, dtype), rows in _grouped(file.rows["throughput"], "arch", "n", "dtype"):
        rates, gains = [], []
        for number, (method, own) in enumerate(_grouped(rows, "method")):
            rates.append(_series(str(method[0]), number, own, "batch", "tokens_per_s"))
            measured = [row for row in own if row.get("gain") is not None and row["method"] != "dense"]
            if measured:
                gains.append(_series(str(method[0]), number, measured, "batch", "gain"))
        panels = [Panel("Prompt tokens per second", "prompts", "tokens per second", rates)]
        if gains:
            panels.append(Panel("Gain over dense", "prompts", "times the tokens per second", gains))
        yield ReportFigure(
            f"Throughput: {arch}, {dtype or 'dtype not named'}, prompts of {length:,} tokens",
            "Prompt tokens over the time until the last prompt's first token.",
            _draw(panels, f"{file.name} throughput {arch} {length} {dtype}"),
            _table(rows),
            (file,),
        )


def _interference(file: ResultFile) -> Iterable[ReportFigure]:
    yield ReportFigure(
        "A long prompt among requests that are generating",
        "Times between tokens before the long prompt arrives (idle) and during its prefill (busy).",
        [],
        _table(file.rows["interference"]),
        (file,),
    )


def _decoding(file: ResultFile) -> Iterable[ReportFigure]:
    yield ReportFigure(
        "Decode steps of the engine",
        "Median of a step while all requests generate; the host's part is processor time of the thread that steps.",
        [],
        _table(file.rows["decoding"]),
        (file,),
    )


def _steps(file: ResultFile) -> Iterable[ReportFigure]:
    for (arch, length, batch, dtype), rows in _grouped(file.rows["steps"], "arch", "n", "batch", "dtype"):
        names = list(dict.fromkeys(row["step"] for row in rows))
        panels = [
            Panel(
                f"Time by step, {method}",
                "prompt tokens",
                "milliseconds",
                [_series(row["step"], names.index(row["step"]), [row], "n", "ms") for row in own],
            )
            for (method,), own in _grouped(rows, "method")
        ]
        yield ReportFigure(
            f"Time by step: {arch}, {dtype or 'dtype not named'}, {_prompts(batch)} of {length:,} tokens",
            "One traced run. Rates: operations by the cost model, and the least bytes that have to move.",
            _draw(panels, f"{file.name} steps {arch} {length} {batch} {dtype}"),
            _table(rows),
            (file,),
        )


def _kernels(file: ResultFile) -> Iterable[ReportFigure]:
    rows = file.rows["kernels"]
    timed = [row for row in rows if not row.get("near_resolution")]
    panels, without = [], []
    for (operation,), _ in _grouped(rows, "op"):
        own = [row for row in timed if row["op"] == operation]
        if all(row.get("backend") == PLAIN_BACKEND for row in own):
            without.append(operation)
            continue
        shapes = list(dict.fromkeys(_shape(row, own) for row in own))
        lines = _grouped_by(own, lambda row, own=own: (_shape(row, own), row.get("backend")))
        series = [
            _series(shape, shapes.index(shape), line, "n", "share_of_floor", dashed=backend == PLAIN_BACKEND)
            for (shape, backend), line in lines
        ]
        panels.append(Panel(operation, "tokens", "share of the limit", series, dashed_means="plain JAX", percent=True))
    note = (
        "The limit is the time that moving the bytes would take at the rate of a copy, or multiplying at the rate of a "
        "large product. What reads more than it writes may be a little faster than a copy."
    )
    if len(timed) < len(rows):
        note += f" {len(rows) - len(timed)} rows are too short for the timer and in the table only."
    if without:
        note += f" Of {', '.join(without)} there is no timed kernel to plot; see the table."
    operations = ", ".join(operation for (operation,), _ in _grouped(rows, "op"))
    yield ReportFigure(
        f"Share of the hardware's limit: {operations}",
        " ".join([note, *file.notes]),
        _draw(panels, f"{file.name} kernels"),
        _table([*file.rows.get("ceilings", []), *rows]),
        (file,),
    )


def _checks(file: ResultFile) -> Iterable[ReportFigure]:
    note = "Checked in the same run, before anything was timed."
    yield ReportFigure("Kernels against their references", note, [], _table(file.rows["checks"]), (file,))


def _compiled(file: ResultFile) -> Iterable[ReportFigure]:
    panels = []
    for (arch,), rows in _grouped(file.rows["compiled"], "arch"):
        prefills = [row for row in rows if row["phase"] == "prefill"]
        lines = _grouped(prefills, "topology", "method")
        series = [
            _series(f"{topology}, {method}", number, own, "n", "hbm_gib")
            for number, ((topology, method), own) in enumerate(lines)
        ]
        if series:
            panels.append(Panel(arch, "prompt tokens", "GiB per chip, prefill", series))
    yield ReportFigure(
        "Compiled for chips that were not there",
        "What the compiler reserves on every chip: arguments, results, scratch and code. Nothing ran.",
        _draw(panels, f"{file.name} compiled"),
        _table(file.rows["compiled"]),
        (file,),
    )


def _accuracy(file: ResultFile) -> Iterable[ReportFigure]:
    for (model, length, harness), rows in _grouped(file.rows["accuracy"], "model", "length", "harness"):
        tasks = [task for (task,), _ in _grouped(rows, "task")]
        # The average over tasks where there is one, else the first task.
        shown = "average" if "average" in tasks else tasks[0]
        families = _grouped_by([row for row in rows if row["task"] == shown], lambda row: family(row["config"]))
        series = [_series(name, number, own, "flop_fraction", "score") for number, (name, own) in enumerate(families)]
        title = f"Score against operations: {shown.replace('_', ' ')}"
        panel = Panel(title, "operations, of dense", "score", series, share_x=True)
        yield ReportFigure(
            f"Accuracy: {model}, {length:,} tokens, {harness or 'harness not named'}",
            "Lines join settings that differ in top_p alone; differences to dense are of the same prompts, with their "
            "95% interval.",
            _draw([panel], f"{file.name} accuracy {model} {length} {harness}"),
            _table(rows),
            (file,),
        )


def _frontier(files: Sequence[ResultFile]) -> list[ReportFigure]:
    """The models of all files side by side, where there is more than one."""
    panels = [panel for file in files for panel in frontier_panels(file.rows["accuracy"], file.name)]
    if len(panels) < 2:
        return []
    note = (
        "The average over a model's tasks and lengths, of settings that were asked at all of its lengths. Lines join "
        "settings that differ in top_p alone; dashed is what no other setting beats in both score and operations."
    )
    return [ReportFigure("Accuracy against operations, by model", note, _draw(panels, "frontier"), None, tuple(files))]


def _calibration(file: ResultFile) -> Iterable[ReportFigure]:
    yield ReportFigure(
        "The search for a model's own setting",
        "Points lost on average over tasks with the upper confidence limit; the confirmed ones on prompts that the "
        "search has not seen.",
        [],
        _table(file.rows["calibration"]),
        (file,),
    )


def _soak(file: ResultFile) -> Iterable[ReportFigure]:
    rows = [{name: value for name, value in row.items() if name != "checks"} for row in file.rows["soak"]]
    yield ReportFigure(
        "The server under load for a while",
        "Requests at random times, some of which go away before their end; then what was held, lost or miscounted.",
        [],
        _table([row | whole["checks"] for row, whole in zip(rows, file.rows["soak"], strict=True)]),
        (file,),
    )


BUILDERS: dict[str, Callable[[ResultFile], Iterable[ReportFigure]]] = {
    "ttft": _ttft,
    "throughput": _throughput,
    "interference": _interference,
    "decoding": _decoding,
    "steps": _steps,
    "kernels": _kernels,
    "checks": _checks,
    "compiled": _compiled,
    "accuracy": _accuracy,
    "calibration": _calibration,
    "soak": _soak,
}


def _draw(panels: Sequence[Panel], name: str) -> list[str]:
    return [draw(panels[at : at + PANELS_IN_A_ROW], f"{name} {at}") for at in range(0, len(panels), PANELS_IN_A_ROW)]


def _series(label: str, colour: int, rows: Sequence[Row], x: str, y: str, dashed: bool = False) -> Series:
    points = sorted((row[x], row[y]) for row in rows)
    return Series(label, [point[0] for point in points], [point[1] for point in points], colour, dashed)


def _grouped(rows: Iterable[Row], *keys: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows with the same values of the keys together, in the order in which the values first appear."""
    return _grouped_by(rows, lambda row: tuple(row.get(key) for key in keys))


def _grouped_by[Key: Hashable](rows: Iterable[Row], key: Callable[[Row], Key]) -> list[tuple[Key, list[Row]]]:
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def _method(row: Row) -> str:
    return f"top_p {row['top_p']}" if row.get("top_p") is not None else str(row["method"])


def _prompts(batch: int) -> str:
    return "one prompt" if batch == 1 else f"{batch} prompts together"


def _shape(row: Row, among: Sequence[Row]) -> str:
    """What tells the row's shape from the others."""
    names = {
        ("batch",): "batch {}",
        ("heads", "kv_heads", "head_dim"): "{}/{} heads of {}",
        ("width",): "width {}",
        ("kept",): "kept {:.0%}",
        ("window",): "window {}",
        ("inner", "columns"): "{} to {}",
        ("groups",): "{} groups",
        ("routing",): "{}",
        ("dtype",): "{}",
    }
    parts = []
    for keys, name in names.items():
        values = [row.get(key) for key in keys]
        if None not in values and len({tuple(other.get(key) for key in keys) for other in among}) > 1:
            parts.append(name.format(*values))
    if row.get("ragged"):
        parts.append("ragged")
    return ", ".join(parts) or "kernel"


def _table(rows: Sequence[Row]) -> Table:
    headings = list(dict.fromkeys(key for row in rows for key in row))
    return Table(headings, [[format_value(row.get(heading)) for heading in headings] for row in rows])


def format_value(value: Any) -> str:
    """A JSON value as the tables show it: floats to six digits, lists spelled with ">", objects as pairs."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " > ".join(map(format_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_value(own)}" for name, own in value.items())
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
