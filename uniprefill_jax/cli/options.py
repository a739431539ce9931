"""Options that several commands share, with their help, and the objects made from them."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from rich.console import Console

    from uniprefill_jax.llm import LLM

DROPPING = "Dropping prompt tokens (UniPrefill)"

DataType = Literal["auto", "float32", "bfloat16"]

DataTypeOption = Annotated[
    DataType, typer.Option("--dtype", help="Type of weights and activations; auto: float32 on CPU, else bfloat16.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the measurements to this file.")]
DenseOption = Annotated[bool, typer.Option("--dense", help="Drop nothing.", rich_help_panel=DROPPING)]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Share of attention mass that stays, in (0, 1].", rich_help_panel=DROPPING)
]
BlockSizeOption = Annotated[
    int, typer.Option("--block-size", help="Tokens scored and dropped together.", rich_help_panel=DROPPING)
]
DropLayersOption = Annotated[
    str,
    typer.Option("--drop-layers", help='"auto", "none" or numbers such as 7,11,15.', rich_help_panel=DROPPING),
]
DroppedTokensOption = Annotated[
    Literal["discard", "carry"],
    typer.Option("--dropped-tokens", help="Gone for good, or back at the next drop layer.", rich_help_panel=DROPPING),
]
SlidingWindowOption = Annotated[
    Literal["position", "kept"],
    typer.Option("--sliding-window", help="Count windows in positions or kept tokens.", rich_help_panel=DROPPING),
]
CutOption = Annotated[
    Literal["crossing", "below"],
    typer.Option("--cut", help="Whether the block that crosses top-p stays.", rich_help_panel=DROPPING),
]
ScoreOption = Annotated[
    Literal["mean", "peak"],
    typer.Option("--score", help="Mean or peak of attention over heads and rows.", rich_help_panel=DROPPING),
]
ScoreMemoryOption = Annotated[
    float,
    typer.Option("--score-memory", help="Weight of the previous drop layer's score.", rich_help_panel=DROPPING),
]
TopPOverOption = Annotated[
    Literal["all", "candidates"],
    typer.Option("--top-p-over", help="Blocks that top-p counts.", rich_help_panel=DROPPING),
]

ModelArgument = Annotated[
    str, typer.Argument(help="Folder, .gguf file or packaged model (smollm2-135m, gemma-3-270m, qwen3-next-needles).")
]
MethodOption = Annotated[
    str,
    typer.Option(
        "--method",
        help="Instead: another method, such as xattention:threshold=0.95 or uniprefill+snapkv.",
        rich_help_panel=DROPPING,
    ),
]


def parse_drop_layers(text: str) -> Literal["auto"] | tuple[int, ...]:
    """The drop layers that a user wrote: "auto", "none", or layer numbers separated by commas.

    Raises:
        InputError: anything else.
    """
    if text == "auto":
        return "auto"
    if text == "none":
        return ()
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        message = f'--drop-layers is {text!r}; use "auto", "none" or layer numbers such as 7,11,15'
        raise InputError(message) from None


def numbers[Number: (int, float)](option: str, text: str, kind: type[Number]) -> list[Number]:
    """The numbers that a user wrote, separated by commas.

    Raises:
        InputError: something else is among them.
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} is {text!r}; use numbers separated by commas") from None


def architecture(arch: str, model: str) -> dict[str, Any] | None:
    """The config.json contents of `arch`; None where a model with weights is named.

    Raises:
        InputError: both or neither are named, or an unknown architecture is.
    """
    from uniprefill_jax.bench.architectures import ARCHITECTURES

    if bool(arch) == bool(model):
        raise InputError("name either --arch or --model")
    if arch and arch not in ARCHITECTURES:
        raise InputError(f"--arch is {arch!r}; use one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch] if arch else None


def open_model(model: str, config: dict[str, Any] | None, dtype: str, mesh: "Mesh | None" = None) -> "LLM":
    """The model of what `architecture` returned: random weights for a config, else those of `model`."""
    from uniprefill_jax.llm import LLM

    if config is None:
        return LLM.load(model, dtype=dtype, mesh=mesh)
    return LLM.from_config(config, dtype=dtype, mesh=mesh)


def resolve_dtype(choice: DataType) -> Literal["float32", "bfloat16"]:
    """The data type to load in: the one named, or what suits the default backend."""
    if choice != "auto":
        return choice
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def check_output(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that could not be written, before minutes of work go into it; `option` is where it was named.

    Raises:
        InputError: the path is a folder, or its folder does not exist.
    """
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise InputError(f"{option} is {path}, which cannot be written; name a file in a folder that exists")


def names_setting(context: typer.Context) -> bool:
    """Whether the user gave any of the dropping options; otherwise a model's calibrated setting may serve."""
    known = {field.name for field in fields(UniPrefillConfig)} | {"dense"}
    sources = (context.get_parameter_source(name) for name in context.params.keys() & known)
    return any(source is not None and source.name != "DEFAULT" for source in sources)


def own_setting(console: "Console", context: typer.Context, config: UniPrefillConfig, llm: "LLM") -> UniPrefillConfig:
    """The setting that a run uses: `config` where the user named any part of it, else the model's default."""
    if names_setting(context):
        return config
    if llm.calibrated is not None:
        console.print(f"setting: {llm.calibrated.source}", style="dim", highlight=False, markup=False)
    return llm.default_config


def make_config(
    *,
    dense: bool,
    top_p: float,
    block_size: int,
    drop_layers: str,
    dropped_tokens: Literal["discard", "carry"],
    sliding_window: Literal["position", "kept"],
    cut: Literal["crossing", "below"],
    score: Literal["mean", "peak"],
    score_memory: float,
    top_p_over: Literal["all", "candidates"],
) -> UniPrefillConfig:
    """The configuration behind the dropping options; `dense` overrides the others.

    Raises:
        ConfigError, InputError: a value is out of its range.
    """
    config = UniPrefillConfig(
        top_p=top_p,
        block_size=block_size,
        drop_layers=parse_drop_layers(drop_layers),
        dropped_tokens=dropped_tokens,
        sliding_window=sliding_window,
        cut=cut,
        score=score,
        score_memory=score_memory,
        top_p_over=top_p_over,
    )
    return UniPrefillConfig.dense() if dense else config
