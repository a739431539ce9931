"""Result rows as Markdown, and the places of a document that hold them: a figure is never typed by hand.

A place begins with a comment that names the table and the files, and ends with another:

    <!-- table: accuracy benchmarks/results/ruler.json -->
    ...
    <!-- end of table -->
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from uniprefill_jax.errors import InputError
from uniprefill_jax.eval.rows import ABLE_AVERAGE, AVERAGES, is_able
from uniprefill_jax.eval.settings import DENSE

Row = dict[str, Any]
_PLACE = re.compile(r"<!-- table: (?P<kind>\S+) (?P<files>[^\n]*?) -->\n(?P<body>.*?)<!-- end of table -->", re.S)


def fill_tables(text: str, root: Path) -> str:
    """The document with the tables of all its places made anew; files are named relative to `root`.

    Raises:
        InputError: no such table, or a file that cannot be read, or one without rows that the table needs.
    """
    return _PLACE.sub(lambda place: _filled(place, root), text)


def tables_of(text: str) -> list[str]:
    """What its places ask for, such as "accuracy benchmarks/results/ruler.json"."""
    return [f"{place['kind']} {place['files']}" for place in _PLACE.finditer(text)]


def accuracy_table(rows: Sequence[Row]) -> str:
    """A row per model, length and setting: operations, kept tokens, averages with their interval, TTFT ratio.

    Of one task alone that task's score stands for the average.
    """
    last = {_cell(row): row for row in rows if row["task"] != ABLE_AVERAGE and row["metric"] != "loss"}
    able = {_cell(row): row for row in rows if row["task"] == ABLE_AVERAGE}
    _needed(last, "accuracy")
    timed = any("ttft_ratio" in row for row in last.values())
    headings = ["model", "tokens", "setting", "FLOPs of dense", "kept after each drop", "average", "difference"]
    headings += ["difference, able tasks"] if able else []
    headings += ["prefill, of dense"] if timed else []
    lines = []
    for cell, row in last.items():
        kept = " ".join(f"{share:.2f}" for share in row["kept"])
        shown = [row["model"], f"{row['length']:,}", _setting(row), f"{row['flop_fraction']:.2f}", kept]
        shown += [f"{row['score']:.1f}", _difference(row)]
        shown += [_difference(able[cell]) if cell in able else ""] if able else []
        shown += [f"{row['ttft_ratio']:.2f}" if "ttft_ratio" in row else ""] if timed else []
        lines.append(shown)
    return _markdown(headings, lines, left=("model", "setting"))


def tasks_table(rows: Sequence[Row]) -> str:
    """The dense score of every task at every length of a model; in brackets where the model does not do the task."""
    dense = [row for row in rows if row["config"] == DENSE and row["task"] not in AVERAGES and row["metric"] != "loss"]
    _needed(dense, "tasks")
    found = {(row["model"], row["length"], row["task"]): row for row in dense}
    columns = sorted({(model, length) for model, length, _ in found})
    lines = []
    for task in dict.fromkeys(row["task"] for row in dense):
        scores = []
        for column in columns:
            row = found.get((*column, task))
            scores.append("" if row is None else _able(row, f"{row['score']:.1f}"))
        lines.append([task, *scores])
    return _markdown(["task", *(f"{model}, {length:,}" for model, length in columns)], lines, left=("task",))


def probes_table(rows: Sequence[Row]) -> str:
    """What dropping finds hard: a row per model, length and probe, dense's score and each setting's difference to it.

    Losses are in nats per token, where more is worse. Probes that the dense model does not do are in brackets.
    """
    own = [row for row in rows if row["task"] not in AVERAGES]
    _needed(own, "probes")
    settings = [name for name in dict.fromkeys(row["config"] for row in own) if name != DENSE]
    names = {row["config"]: _setting(row) for row in own}
    cells = {(*_place(row), row["config"]): row for row in own}
    lines = []
    for place in dict.fromkeys(map(_place, own)):
        any_row = next(row for row in own if _place(row) == place)
        digits = 3 if any_row["metric"] == "loss" else 1
        dense = _able(any_row, f"{any_row['dense_score']:.{digits}f}")
        changes = [cells.get((*place, name)) for name in settings]
        model, length, task = place
        lines.append([model, f"{length:,}", task, dense, *(_difference(row, digits) if row else "" for row in changes)])
    headings = ["model", "tokens", "probe", "dense", *(names[name] for name in settings)]
    return _markdown(headings, lines, left=("model", "probe"))


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "accuracy": accuracy_table,
    "tasks": tasks_table,
    "probes": probes_table,
}


def _filled(place: re.Match[str], root: Path) -> str:
    kind = place["kind"]
    if kind not in TABLES:
        raise InputError(f"there is no table {kind!r}; use one of {', '.join(TABLES)}")
    rows: list[Row] = []
    for name in place["files"].split():
        try:
            rows += json.loads((root / name).read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise InputError(f"{name} is no result file ({problem}); name one that an eval command wrote") from None
    try:
        table = TABLES[kind](rows)
    except (KeyError, TypeError) as problem:
        raise InputError(
            f"the {kind} table of {place['files']}: a row is not of an evaluation, or lacks {problem}; make the file "
            "anew with `uniprefill eval table`"
        ) from None
    return f"<!-- table: {kind} {place['files']} -->\n{table}<!-- end of table -->"


def _needed(rows: object, kind: str) -> None:
    if not rows:
        raise InputError(f"the files hold no rows for the {kind} table; name others")


def _able(row: Row, score: str) -> str:
    """A dense score, in brackets where the model does not do the task."""
    return score if row["metric"] == "loss" or is_able(row["task"], row["dense_score"]) else f"({score})"


def _place(row: Row) -> tuple[str, int, str]:
    return row["model"], row["length"], row["task"]


def _cell(row: Row) -> tuple[str, int, str]:
    return row["model"], row["length"], row["config"]


def _setting(row: Row) -> str:
    """A setting as `--config` takes it."""
    return row["config"] if row["config"].isidentifier() else f"`{row['config']}`"


def _difference(row: Row, digits: int = 1) -> str:
    if row["config"] == DENSE:
        return ""
    change = f"{row['diff']:+.{digits}f}"
    if row["ci_low"] is None:
        return change
    return f"{change} ({row['ci_low']:+.{digits}f} to {row['ci_high']:+.{digits}f})"


def _markdown(headings: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """A table; columns but those `left` are aligned to the right."""
    rules = ["---" if heading in left else "---:" for heading in headings]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, rules, *lines))
