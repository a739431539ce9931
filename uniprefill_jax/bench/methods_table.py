"""The table of `bench methods`, laid out as the paper's Table 1: a row per method, accuracy and speed by length."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from uniprefill_jax.errors import InputError
from uniprefill_jax.eval.rows import AVERAGE

Scores = Mapping[tuple[str, int], float]


def scores_of(path: Path) -> dict[tuple[str, int], float]:
    """(method as it was written, length) to score, from a result file of `eval ruler`.

    Raises:
        InputError: it is no such file.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        last = {(row["config"], row["length"]): row for row in rows if row["task"] == AVERAGE}
        last = {(row["config"], row["length"]): row for row in rows} | last
        return {place: float(row["score"]) for place, row in last.items()}
    except (ValueError, KeyError, TypeError):
        raise InputError(f"--accuracy {path} is no result file of `uniprefill eval ruler --json`") from None


def print_methods(
    console: Console, rows: Sequence[Mapping[str, Any]], ends: Sequence[Mapping[str, Any]], scores: Scores
) -> None:
    """A row per method: scores by length and their average, then speed-ups by length, memory, and break-even."""
    names = list(dict.fromkeys(["dense", *(row["method"] for row in rows)]))
    lengths, scored = sorted({row["n"] for row in rows}), sorted({length for _, length in scores})
    by_place = {(row["method"], row["n"]): row for row in rows}
    even = {row["method"]: row["break_even"] for row in ends}
    table = Table(title="score by length, speed-up of the prefill by length (share of attention computed)")
    headings = [*(f"score {n:,}" for n in scored), *(["average"] if scored else []), *(f"{n:,}" for n in lengths)]
    table.add_column("method", overflow="fold")
    for heading in (*headings, "peak GiB", "faster from"):
        table.add_column(heading, justify="right")
    for name in names:
        own = [scores.get((name, length)) for length in scored]
        known = [score for score in own if score is not None]
        cells = ["" if score is None else f"{score:.2f}" for score in own]
        if scored:
            cells.append(f"{sum(known) / len(known):.2f}" if len(known) == len(own) else "")
        found = [by_place.get((name, length)) for length in lengths]
        cells += [f"{row['speedup']:.2f}x ({row['computed_attention']:.2f})" if row else "" for row in found]
        longest = next((row for row in reversed(found) if row), None)
        memory = f"{longest['peak_gib']:.2f}" if longest else ""
        first = "" if name == "dense" else f"{even[name]:,}" if even.get(name) else "never here"
        table.add_row(name, *cells, memory, first)
    console.print(table)
