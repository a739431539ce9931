"""`uniprefill convert`: a Hugging Face folder or GGUF file to an Orbax folder that loads without conversion."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from uniprefill_jax.cli.options import DataTypeOption, resolve_dtype


def convert(
    source: Annotated[str, typer.Argument(help="Folder, .gguf file or packaged model (smollm2-135m, gemma-3-270m).")],
    destination: Annotated[Path, typer.Argument(help="Folder to make; it must not exist yet.")],
    dtype: DataTypeOption = "auto",
) -> None:
    """Write SOURCE as an Orbax checkpoint, with its configuration and tokenizer, into DESTINATION."""
    from checkpoints_convert import convert as convert_checkpoint

    console = Console(stderr=True)
    columns = (TextColumn("Reading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # Off a terminal the bar would leave an empty line behind, even before an error.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(source, total=None)
        convert_checkpoint(
            source,
            destination,
            resolve_dtype(dtype),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(f"Wrote {destination}", highlight=False)
