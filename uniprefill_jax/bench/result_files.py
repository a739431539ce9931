"""Reads the result files of a folder and sorts their rows by what they measure."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uniprefill_jax.errors import InputError

Row = Mapping[str, Any]
HEADINGS: dict[str, type] = {"command": str, "date": str, "device": str, "versions": dict, "rows": list}


@dataclass(frozen=True)
class ResultFile:
    """One result file.

    Attributes:
        name: its name in the folder.
        command, date, device, versions: how, when, where and with what it was measured.
        rows: its rows by kind, each kind one of KINDS, in the file's order.
        notes: what the file itself says about its rows.
    """

    name: str
    command: str
    date: str
    device: str
    versions: dict[str, str]
    rows: dict[str, list[Row]]
    notes: list[str]


@dataclass(frozen=True)
class Unreadable:
    """A file, or rows of one, that cannot be shown, and why."""

    name: str
    reason: str


def _numbers(*names: str) -> Callable[[Row], bool]:
    return lambda row: all(isinstance(row.get(name), int | float) for name in names)


# The first kind whose test a row passes is its kind.
KINDS: dict[str, Callable[[Row], bool]] = {
    "kernels": lambda row: isinstance(row.get("op"), str) and _numbers("n", "median_ms", "share_of_floor")(row),
    "ceilings": lambda row: row.get("op") == "ceilings",
    "checks": lambda row: isinstance(row.get("op"), str) and "median_ms" not in row,
    "decoding": lambda row: _labelled(row) and _numbers("n", "batch", "step_ms", "host_ms_per_step")(row),
    "throughput": lambda row: _labelled(row) and _numbers("n", "batch", "tokens_per_s")(row),
    "interference": lambda row: _labelled(row) and _numbers("n", "batch", "median_itl_busy_ms")(row),
    "ttft": lambda row: _labelled(row) and _numbers("n", "batch", "ttft_ms")(row),
    "steps": lambda row: _labelled(row) and isinstance(row.get("step"), str) and _numbers("n", "ms")(row),
    "compiled": lambda row: (
        _labelled(row)
        and all(isinstance(row.get(name), str) for name in ("topology", "phase"))
        and _numbers("n", "hbm_gib")(row)
    ),
    "accuracy": lambda row: _answered(row) and _numbers("length", "score", "dense_score", "flop_fraction")(row),
    "soak": lambda row: (
        _numbers("minutes", "rate", "finished", "cancelled")(row) and isinstance(row.get("checks"), dict)
    ),
    "calibration": lambda row: isinstance(row.get("config"), str) and _numbers("loss", "loss_limit")(row),
}


def _labelled(row: Row) -> bool:
    return isinstance(row.get("arch"), str) and isinstance(row.get("method"), str)


def _answered(row: Row) -> bool:
    return all(isinstance(row.get(name), str) for name in ("model", "task", "config"))


def read_folder(folder: Path) -> tuple[list[ResultFile], list[Unreadable]]:
    """Every .json file of a folder, by name; what is not understood is named with its reason.

    Raises:
        InputError: there is no such folder, or no .json file in it.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; name one with result files such as benchmarks/results")
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InputError(f"{folder} holds no .json file; write some with --json, or name another folder")
    files: list[ResultFile] = []
    unreadable: list[Unreadable] = []
    for path in paths:
        try:
            file, unknown = _read(path)
        except InputError as error:
            unreadable.append(Unreadable(path.name, str(error)))
            continue
        if unknown:
            unreadable.append(Unreadable(path.name, _describe(unknown)))
        if file.rows:
            files.append(file)
    return files, unreadable


def _read(path: Path) -> tuple[ResultFile, list[Any]]:
    """The file, and those of its rows that are of no kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"it holds a {type(content).__name__}, not an object with {', '.join(HEADINGS)}")
    wrong = [name for name, kind in HEADINGS.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise InputError(f"it has no usable {', '.join(wrong)}; result files are written by --json")
    if not content["rows"]:
        raise InputError("it has no rows; was the measurement cut short?")
    rows: dict[str, list[Row]] = {}
    unknown = []
    for row in content["rows"]:
        kind = next((name for name, fits in KINDS.items() if isinstance(row, dict) and fits(row)), None)
        if kind is None:
            unknown.append(row)
        else:
            rows.setdefault(kind, []).append(row)
    headings = {name: content[name] for name in ("command", "date", "device", "versions")}
    notes = content.get("notes", [])
    return ResultFile(path.name, **headings, rows=rows, notes=[str(note) for note in notes]), unknown


def _describe(unknown: list[Any]) -> str:
    first = unknown[0]
    keys = ", ".join(map(str, first)) if isinstance(first, dict) else repr(first)
    rows = "1 row is" if len(unknown) == 1 else f"{len(unknown)} rows are"
    return f"{rows} of no known kind ({', '.join(KINDS)}); the first has {keys}"
