"""`uniprefill bench`: measurements of whole models."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from uniprefill_jax.cli import devices, options
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError

bench = typer.Typer(help="Measure: time to the first token.", no_args_is_help=True)
DEFAULTS = UniPrefillConfig()


@bench.callback()
def _group() -> None:
    """Keeps `ttft` a command of its own while it is the only one."""


@bench.command()
def ttft(
    arch: Annotated[str, typer.Option(help="Published shape with random weights, such as llama-3.1-8b.")] = "",
    model: Annotated[str, typer.Option(help="Or a model with its weights: folder, .gguf file, packaged name.")] = "",
    text: Annotated[
        Path | None, typer.Option(help="Cut prompts from this text (needs a tokenizer); else random tokens.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "4096,8192,32768,131072",
    batches: Annotated[str, typer.Option(help="Prompts at a time.")] = "1",
    top_p: Annotated[
        str,
        typer.Option(help="Settings to measure; with random weights the share of blocks kept at each drop is close."),
    ] = "1.0,0.9,0.7,0.5",
    drop_layers: options.DropLayersOption = "auto",
    dropped_tokens: options.DroppedTokensOption = DEFAULTS.dropped_tokens,
    sliding_window: options.SlidingWindowOption = DEFAULTS.sliding_window,
    runs: Annotated[int, typer.Option(min=2, help="Most timed runs of each method.")] = 20,
    seconds: Annotated[float, typer.Option(help="No more runs of a pair of methods after so many seconds.")] = 20.0,
    dtype: options.DataTypeOption = "auto",
    lengths_by: Annotated[
        Literal["auto", "loops", "ladder", "kernels"],
        typer.Option(help="How the work follows the kept rows."),
    ] = "auto",
    compare_python: Annotated[
        str, typer.Option(help="Also time transformers on the same device, with this interpreter (it needs PyTorch).")
    ] = "",
    json_path: options.JsonOption = None,
    tensor_parallel_size: devices.TensorParallelOption = None,
    distributed: devices.DistributedOption = False,
    coordinator_address: devices.CoordinatorAddressOption = None,
    num_processes: devices.NumProcessesOption = None,
    process_id: devices.ProcessIdOption = None,
) -> None:
    """Time to the first token: dense against dropping, in turns, beside the cost model's ideal and transformers."""
    options.check_output(json_path)
    cells = _cells(lengths, batches)
    top_ps = options.numbers("--top-p", top_p, float)
    base = UniPrefillConfig(
        drop_layers=options.parse_drop_layers(drop_layers),
        dropped_tokens=dropped_tokens,
        sliding_window=sliding_window,
    )
    for value in top_ps:
        UniPrefillConfig(top_p=value)
    config = _architecture(arch, model)
    rivals: dict[tuple[int, int], dict[str, Any]] = {}
    if compare_python:
        # Before this process takes the device's memory.
        if config is None:
            raise InputError("--compare-python measures random weights; name an --arch, not a --model")
        if distributed:
            raise InputError("--compare-python measures one device; leave it or --distributed out")
        rivals = _transformers(compare_python, config, cells, runs, seconds, options.resolve_dtype(dtype))
    with devices.open_devices(
        tensor_parallel_size, distributed, coordinator_address, num_processes, process_id
    ) as where:
        from uniprefill_jax.bench.ttft import Measurement
        from uniprefill_jax.llm import LLM
        from uniprefill_jax.result_file import write_result

        data_type = options.resolve_dtype(dtype)
        if config is None:
            llm = LLM.load(model, dtype=data_type, mesh=where.mesh)
        else:
            llm = LLM.from_config(config, dtype=data_type, mesh=where.mesh)
        measurement = Measurement(
            arch or model, tuple(top_ps), base, runs, seconds, lengths_by, _tokens(llm, text, max(cells)[0])
        )
        command = " ".join(["uniprefill", *sys.argv[1:]])
        table: list[dict[str, Any]] = []
        for length, batch in cells:
            for row in measurement.rows(llm, length, batch):
                row |= rivals.get((length, batch), {}) if row["method"] == "dense" else {}
                table.append(row)
                if where.speaks:
                    print(json.dumps(row), flush=True)
            if where.speaks and json_path is not None:  # after every cell: a run cut short leaves what it measured
                write_result(json_path, command, table)


def _cells(lengths: str, batches: str) -> list[tuple[int, int]]:
    pairs = [
        (length, batch)
        for length in options.numbers("--lengths", lengths, int)
        for batch in options.numbers("--batches", batches, int)
    ]
    wrong = next((pair for pair in pairs if min(pair) < 1), None)
    if wrong is not None:
        raise InputError(f"length {wrong[0]} with batch {wrong[1]}: both must be at least 1")
    return sorted(pairs, key=lambda cell: cell[0] * cell[1])


def _architecture(arch: str, model: str) -> dict[str, Any] | None:
    """The config.json contents of `arch`; None where a model with weights is named."""
    from uniprefill_jax.bench.architectures import ARCHITECTURES

    if bool(arch) == bool(model):
        raise InputError("name either --arch or --model")
    if arch and arch not in ARCHITECTURES:
        raise InputError(f"--arch is {arch!r}; use one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch] if arch else None


def _tokens(llm: Any, text: Path | None, longest: int) -> Any:
    """Token ids of the text, if there is one and it is long enough."""
    if text is None:
        return None
    import numpy as np

    if llm.tokenizer is None:
        raise InputError("--text needs a tokenizer, and this model has none; leave it out for random tokens")
    ids = np.asarray(llm.tokenizer.encode(text.read_text(encoding="utf-8")), np.int32)
    if len(ids) < longest:
        raise InputError(f"{text} has {len(ids)} tokens, and --lengths asks for {longest}; use a longer text")
    return ids


def _transformers(
    python: str, config: dict[str, Any], cells: list[tuple[int, int]], runs: int, seconds: float, dtype: str
) -> dict[tuple[int, int], dict[str, Any]]:
    """What the rival took, by (length, batch)."""
    script = Path(__file__).parents[1] / "bench" / "transformers_ttft.py"
    job = {"config": config, "cells": cells, "runs": runs, "seconds": seconds / 2, "dtype": dtype}
    done = subprocess.run([python, str(script)], input=json.dumps(job), capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"transformers in {python} failed: {done.stderr.strip().splitlines()[-1:]}")
    first, *measured = map(json.loads, done.stdout.splitlines())
    rows = {}
    for cell in measured:
        value = round(cell["hf_ttft_ms"], 3) if "hf_ttft_ms" in cell else None
        rows[cell["n"], cell["batch"]] = {"hf_ttft_ms": value, "hf_versions": first["versions"]}
        print(json.dumps(cell), flush=True)
    return rows
