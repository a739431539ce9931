"""Progress and rate of reading a checkpoint, for every command that reads one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def reading(console: Console, name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal while the block lasts, and one line with the rate after it; yields what takes the progress.

    The progress is bytes done and in all, of the whole model.
    """
    columns = (
        TextColumn("Reading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    start, total = time.perf_counter(), 0
    # Off a terminal the bar would leave an empty line behind, even before an error.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)

        def advance(done: int, of: int) -> None:
            nonlocal total
            total = of
            bar.update(task, completed=done, total=of)

        yield advance
    seconds = time.perf_counter() - start
    rate = total / max(seconds, 1e-9)
    console.print(
        f"read {name}: {total / 1e9:.2f} GB in {seconds:.1f} s ({rate / 1e9:.2f} GB/s)", style="dim", highlight=False
    )
