"""What an evaluation shows in the terminal: progress with time left, prompts, tables."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from uniprefill_jax.eval.rows import AVERAGES
from uniprefill_jax.eval.runner import Progress

SECONDS_BETWEEN_LINES = 15.0
SHOWN_EDGE = 600  # characters of a long prompt's start and end


@contextmanager
def showing_progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a line now and then elsewhere; both say how long it will take."""
    last = time.perf_counter()

    def line(progress: Progress) -> None:
        nonlocal last
        if time.perf_counter() - last >= SECONDS_BETWEEN_LINES:
            last = time.perf_counter()
            console.print(f"{progress.done:,} of {progress.total:,} answers, {_left(progress)}", highlight=False)

    if not console.is_terminal:
        yield line
        return
    columns = (TextColumn("Answering"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda progress: bar.update(
            task, completed=progress.done, total=progress.total, description=_left(progress)
        )


def print_phases(console: Console, progress: Progress) -> None:
    """Where the time of a run went."""
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in progress.phases.items())
    rest = progress.seconds - sum(progress.phases.values())
    before = progress.done - progress.new
    resumed = f" ({before:,} were there before)" if before else ""
    times = f" in {progress.seconds:.1f} s: {phases}, rest {rest:.1f} s" if progress.new else ""
    console.print(f"{progress.new:,} answers{times}{resumed}", style="dim", highlight=False)


def print_prompt(console: Console, title: str, text: str) -> None:
    """A prompt as the model reads it, special tokens included; the middle of a long one is left out."""
    left_out = len(text) - 2 * SHOWN_EDGE
    if left_out > 0:
        text = f"{text[:SHOWN_EDGE]}\n[... {left_out:,} characters ...]\n{text[-SHOWN_EDGE:]}"
    console.rule(title)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_tables(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """For each model and length tasks by settings, with the difference to dense, and what they kept and took."""
    for model, length in dict.fromkeys((row["model"], row["length"]) for row in rows):
        own = [row for row in rows if (row["model"], row["length"]) == (model, length)]
        settings = list(dict.fromkeys(row["config"] for row in own))
        title = f"{model}, {length:,} tokens: score (difference to dense, 95% interval)"
        table = Table(title=title, title_justify="left")
        table.add_column("task")
        for setting in settings:
            table.add_column(setting, justify="right", overflow="fold")
        for task in dict.fromkeys(row["task"] for row in own):
            cells = {row["config"]: _cell(row) for row in own if row["task"] == task}
            mark = "" if all(row.get("able", True) for row in own if row["task"] == task) else " (not able)"
            label = f"{task}{mark}"
            table.add_row(label, *(cells.get(setting, "") for setting in settings), end_section=task in AVERAGES)
        times = (
            ("prefill, ms per prompt", lambda row: f"{row['prefill_ms']:.1f}"),
            ("prefill, of dense", lambda row: f"{row['ttft_ratio']:.2f}"),
        )
        for label, show in (
            ("samples", lambda row: str(row["samples"])),
            ("kept after each drop", lambda row: " ".join(f"{share:.2f}" for share in row["kept"])),
            ("FLOPs of dense", lambda row: f"{row['flop_fraction']:.2f}"),
            *(times if "ttft_ratio" in own[0] else ()),
        ):
            # The average's row, or that of the only task.
            last = {row["config"]: row for row in own}
            table.add_row(label, *(show(last[setting]) for setting in settings), style="dim")
        console.print(table)


def print_summary(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """A table per model, of a row per setting: its score at every length, their average, its prefill's time by dense's.

    A length's score is that over its tasks; rows without times show none. Nothing is shown of losses or one length.
    """
    models = dict.fromkeys(row["model"] for row in rows)
    if len(models) > 1:
        for model in models:
            print_summary(console, [row for row in rows if row["model"] == model])
        return
    last = {(row["config"], row["length"]): row for row in rows if row["metric"] != "loss"}
    settings, lengths = dict.fromkeys(key[0] for key in last), sorted({key[1] for key in last})
    if len(lengths) < 2:
        return
    timed = lengths if all("ttft_ratio" in row for row in last.values()) else []
    title = f"{next(iter(models))}: score by length, average, speed-up of the prefill by length"
    table = Table(title=title, title_justify="left")
    for heading in ("method", *(f"{length:,}" for length in lengths), "average", *(f"{n:,}, x" for n in timed)):
        table.add_column(heading, justify="left" if heading == "method" else "right", overflow="fold")
    for setting in settings:
        own = [last.get((setting, length)) for length in lengths]
        scores = [None if row is None else row["score"] for row in own]
        shown = [f"{row['score']:.2f}" if row else "" for row in own]
        average = "" if None in scores else f"{sum(filter(None, scores)) / len(scores):.2f}"
        speed = [f"{1 / row['ttft_ratio']:.2f}" if row else "" for row in own[: len(timed)]]
        table.add_row(setting, *shown, average, *speed)
    console.print(table)


def _cell(row: dict[str, Any]) -> str:
    digits = 1 if row["dense_score"] >= 10 or row["score"] >= 10 else 2
    score = f"{row['score']:.{digits}f}"
    if row["method"] == "dense":
        return score
    if row["ci_low"] is None:
        return f"{score} ({row['diff']:+.{digits}f})"
    return f"{score} ({row['diff']:+.{digits}f}, {row['ci_low']:+.{digits}f} to {row['ci_high']:+.{digits}f})"


def _left(progress: Progress) -> str:
    seconds = progress.seconds_left
    if seconds is None:
        return ""
    return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
