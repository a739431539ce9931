"""What the demonstration shows in the terminal: progress, the comparison, and a map of what was kept."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uniprefill_jax.demo.comparison import Comparison, MethodRun, Step

SHADES = " ░▒▓█"
MAP_CELLS = 64


def progress_steps(console: Console) -> Step:
    """A function that names a step while it runs and prints how long it took: ``with step("Loading"): ...``."""

    @contextmanager
    def step(label: str) -> Iterator[None]:
        start = time.perf_counter()
        with console.status(label):
            yield
        console.print(f"  {label}: {time.perf_counter() - start:.1f} s", highlight=False, markup=False)

    return step


def kept_map(length: int, kept_positions: Mapping[int, np.ndarray], cells: int = MAP_CELLS) -> str:
    """One character per stretch of the prompt, darker the more of the drops its tokens survived.

    Args:
        length: prompt tokens.
        kept_positions: for each drop layer, the original positions that were kept there.
        cells: characters to spread the prompt over.
    """
    survived = np.zeros(length)
    for positions in kept_positions.values():
        survived[positions] += 1 / len(kept_positions)
    if not kept_positions:
        survived[:] = 1
    stretches = np.array_split(survived, min(cells, length))
    # Anything kept at all shows, however little of its stretch it is.
    return "".join(SHADES[int(np.ceil(stretch.mean() * (len(SHADES) - 1)))] for stretch in stretches)


def print_comparison(console: Console, comparison: Comparison, fact_position: int) -> None:
    """Print both answers, times, kept tokens per segment, speed-ups, and the map with the fact's place below it."""
    dense, uniprefill = comparison.dense, comparison.uniprefill
    table = Table(box=None, pad_edge=False)
    for heading in ("", "dense", "UniPrefill"):
        table.add_column(heading, overflow="fold")
    table.add_row("answer", _answer(dense), _answer(uniprefill))
    table.add_row("time to first token", *(f"{run.time_to_first_token:.2f} s" for run in (dense, uniprefill)))
    table.add_row("compiling (once)", *(f"{run.prefill.compile_seconds:.1f} s" for run in (dense, uniprefill)))
    table.add_row("tokens per segment", *(_lengths(run) for run in (dense, uniprefill)))
    table.add_row("FLOPs of dense", *(f"{run.prefill.flop_fraction:.0%}" for run in (dense, uniprefill)))
    table.add_row("speed-up, ideal", "", f"{uniprefill.prefill.ideal_speedup:.2f}x")
    table.add_row("speed-up, measured", "", f"{comparison.speedup:.2f}x")
    console.print()
    console.print(table, highlight=False)
    length = dense.prefill.segment_lengths[0]
    cells = kept_map(length, uniprefill.prefill.kept_positions)
    marker = " " * (fact_position * len(cells) // length) + "^ the fact"
    console.print()
    console.print(f"kept  |{cells}|", highlight=False, markup=False)
    console.print(f"       {marker}", highlight=False, markup=False)
    legend = "(start to end of the prompt; darker: more of the drops survived)"
    console.print(f"       {legend}", style="dim", highlight=False)


def _answer(run: MethodRun) -> Text:
    mark = Text("right: ", style="green") if run.is_right else Text("wrong: ", style="red")
    return mark.append(run.answer, style="default")


def _lengths(run: MethodRun) -> str:
    return " > ".join(f"{length:,}" for length in run.prefill.segment_lengths)
