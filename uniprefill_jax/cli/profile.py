"""`uniprefill profile`: where the time of one prefill goes, dense and dropping side by side."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from uniprefill_jax.cli import options
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError

if TYPE_CHECKING:
    from uniprefill_jax.bench.step_times import Profile

DEFAULTS = UniPrefillConfig()
TABLE_WIDTH = 100


def profile(
    arch: Annotated[str, typer.Option(help="Published shape with random weights, such as llama-3.1-8b.")] = "",
    model: Annotated[str, typer.Option(help="Or a model with its weights: folder, .gguf file, packaged name.")] = "",
    length: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32768,
    batch: Annotated[int, typer.Option(min=1, help="Prompts.")] = 1,
    top_p: options.TopPOption = 0.7,
    drop_layers: options.DropLayersOption = "auto",
    dropped_tokens: options.DroppedTokensOption = DEFAULTS.dropped_tokens,
    dtype: options.DataTypeOption = "auto",
    trace: Annotated[Path | None, typer.Option(help="Keep the traces in this folder, for a trace viewer.")] = None,
    json_path: options.JsonOption = None,
) -> None:
    """Trace one prefill of random tokens, dense and dropping, and show the time of every step."""
    options.check_output(json_path)
    config = UniPrefillConfig(
        top_p=top_p, drop_layers=options.parse_drop_layers(drop_layers), dropped_tokens=dropped_tokens
    )
    architecture = options.architecture(arch, model)
    data_type = options.resolve_dtype(dtype)
    from uniprefill_jax.bench.step_times import trace as traced
    from uniprefill_jax.bench.ttft import Method, Prompts
    from uniprefill_jax.result_file import write_result

    llm = options.open_model(model, architecture, data_type)
    if length > llm.config.max_position:
        raise InputError(f"--length is {length}, and the model takes at most {llm.config.max_position}")
    prompts = Prompts(llm, length, batch, None)
    profiles: dict[str, Profile] = {}
    rows: list[dict[str, Any]] = []
    for name, setting in {"dense": UniPrefillConfig.dense(), f"top_p={top_p}": config}.items():
        method = Method(llm, prompts, "auto", setting, scored_at_one=name != "dense")
        method.run()  # compiles and warms up
        program = method.prepare()
        folder = None if trace is None else trace / name
        profiles[name] = found = traced(program, method.program_text, folder)
        operations, moved = method.flops_by_step, method.bytes_by_step
        for step, seconds in found.seconds.items():
            flops, least_bytes = operations.get(step, 0.0), moved.get(step, 0.0)
            rows.append(
                {
                    "arch": arch or model,
                    "n": length,
                    "batch": batch,
                    "dtype": data_type,
                    "method": name,
                    "step": step,
                    "ms": round(seconds * 1e3, 4),
                    "operations": found.counts[step],
                    "tflops_per_second": round(flops / seconds * 1e-12, 2) if seconds else None,
                    "gb_per_second": round(least_bytes / seconds * 1e-9, 3) if seconds else None,
                    "span_ms": round(found.span * 1e3, 4),
                    "gaps_ms": round(found.gaps * 1e3, 4),
                }
            )
    _show(profiles, rows)
    if json_path is not None:
        write_result(json_path, " ".join(["uniprefill", *sys.argv[1:]]), rows)


def _show(profiles: dict[str, "Profile"], rows: list[dict[str, Any]]) -> None:
    """Steps as rows; time, share of all operations' time and rates for every profile."""
    table = Table("step", box=None, pad_edge=False)
    for name in profiles:
        for column in (f"{name} ms", "share", "TFLOP/s", "GB/s"):
            table.add_column(column, justify="right")
    cells = {(row["method"], row["step"]): row for row in rows}
    for step in dict.fromkeys(row["step"] for row in rows):
        line = [step]
        for name, found in profiles.items():
            row = cells.get((name, step))
            if row is None:
                line += [""] * 4
                continue
            rate, byte_rate = row["tflops_per_second"], row["gb_per_second"]
            share = found.seconds[step] / sum(found.seconds.values())
            line += [f"{row['ms']:.3f}", f"{share:.1%}"]
            line += [f"{rate:.2f}" if rate else "", f"{byte_rate:,.4g}" if byte_rate else ""]
        table.add_row(*line)
    for label, part in (("nothing running", "gaps"), ("from first to last", "span")):
        line = [label]
        for found in profiles.values():
            line += [f"{getattr(found, part) * 1e3:.3f}", f"{getattr(found, part) / found.span:.1%}", "", ""]
        table.add_row(*line)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # a narrower one would cut the names of the steps
    console.print(table)
    console.print("Rates: operations by the cost model, and the least bytes that have to move.", style="dim")
