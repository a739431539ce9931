"""`uniprefill convert`: a Hugging Face folder or GGUF file to an Orbax folder that loads without conversion."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from uniprefill_jax.cli.options import DataType, DataTypeOption, resolve_dtype


def convert(
    source: Annotated[str, typer.Argument(help="Folder, .gguf file or packaged model (smollm2-135m, gemma-3-270m).")],
    destination: Annotated[Path, typer.Argument(help="Folder to make; it must not exist yet.")],
    dtype: DataTypeOption = "auto",
) -> None:
    """Write SOURCE as an Orbax checkpoint, with its configuration and tokenizer, into DESTINATION."""
    console = Console(stderr=True)
    _convert(source, destination, dtype, console)


def _convert(source: str, destination: Path, dtype: DataType, console: Console) -> None:
    from checkpoints_convert import convert as convert_checkpoint

    with console.status(f"Converting {source}"):
        convert_checkpoint(source, destination, resolve_dtype(dtype))
    console.print(f"Wrote {destination}")
