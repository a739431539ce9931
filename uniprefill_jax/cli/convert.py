"""`uniprefill convert`: a Hugging Face folder or GGUF file to an Orbax folder that loads without conversion."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from uniprefill_jax.cli.options import DataTypeOption, ModelArgument, resolve_dtype
from uniprefill_jax.cli.reading import reading


def convert(
    source: ModelArgument,
    destination: Annotated[Path, typer.Argument(help="Folder to make; it must not exist yet.")],
    dtype: DataTypeOption = "auto",
) -> None:
    """Write SOURCE as an Orbax checkpoint, with its configuration and tokenizer, into DESTINATION."""
    from checkpoints_convert import convert as convert_checkpoint

    console = Console(stderr=True)
    with reading(console, source) as progress:
        convert_checkpoint(source, destination, resolve_dtype(dtype), progress=progress)
    console.print(f"Wrote {destination}", highlight=False)
