"""`uniprefill bench`: measurements of whole models and of single kernels."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from uniprefill_jax.cli import devices, options
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError

bench = typer.Typer(
    help="Measure: time to the first token, the engine under load, single kernels; report on it.", no_args_is_help=True
)
DEFAULTS = UniPrefillConfig()
WARM_UP_TOKENS = 131_072  # of a load's prompts, ahead of the timed ones
ArchOption = Annotated[str, typer.Option(help="Published shape with random weights, such as llama-3.1-8b.")]
ModelOption = Annotated[str, typer.Option(help="Or a model with its weights: folder, .gguf file, packaged name.")]


@bench.command()
def ttft(
    arch: ArchOption = "",
    model: ModelOption = "",
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
    config = options.architecture(arch, model)
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
        from uniprefill_jax.result_file import write_result

        data_type = options.resolve_dtype(dtype)
        llm = options.open_model(model, config, data_type, where.mesh)
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


@bench.command()
def methods(
    arch: ArchOption = "",
    model: ModelOption = "",
    method: Annotated[
        str, typer.Option(help="Methods, separated by commas; with fields as in xattention:threshold=0.8.")
    ] = "uniprefill,minference,flexprefill,xattention,proxyattn,snapkv",
    lengths: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "4096,8192,32768,131072",
    text: Annotated[
        Path | None, typer.Option(help="Cut prompts from this text (needs a tokenizer); else random tokens.")
    ] = None,
    accuracy: Annotated[
        Path | None, typer.Option(help="Result file of `eval ruler --method`, for the table's scores.")
    ] = None,
    runs: Annotated[int, typer.Option(min=2, help="Most timed runs of each method.")] = 20,
    seconds: Annotated[float, typer.Option(help="No more runs of a method after so many seconds.")] = 20.0,
    dtype: options.DataTypeOption = "auto",
    json_path: options.JsonOption = None,
) -> None:
    """Time to the first token and memory of the methods that UniPrefill is compared with, each in turns with dense."""
    options.check_output(json_path)
    wanted = [length for length, _ in _cells(lengths, "1")]
    config = options.architecture(arch, model)
    from rich.console import Console

    from uniprefill_jax.bench.methods import MethodMeasurement, break_even_rows
    from uniprefill_jax.bench.methods_table import print_methods, scores_of
    from uniprefill_jax.sparsify.methods.protocol import Method

    parsed = tuple(map(Method.parse, method.split(",")))
    scores = {} if accuracy is None else scores_of(accuracy)
    llm = options.open_model(model, config, options.resolve_dtype(dtype))
    measurement = MethodMeasurement(arch or model, parsed, runs, seconds, _tokens(llm, text, max(wanted)))
    add, measured = _row_writer(json_path), []
    for length in wanted:
        for row in measurement.rows(llm, length):
            add(row)
            measured.append(row)
    ends = break_even_rows(measured)
    for row in ends:
        add(row)
    print_methods(Console(stderr=True), measured, ends, scores)


@bench.command()
def throughput(
    arch: ArchOption = "",
    model: ModelOption = "",
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths, in tokens; none: only what --decoding and --interference ask for.")
    ] = "4096,32768",
    batches: Annotated[str, typer.Option(help="Prompts of each length.")] = "1,4,16",
    output_len: Annotated[int, typer.Option(min=1, help="Tokens that each generates; 1 measures prefill.")] = 1,
    range_ratio: Annotated[float, typer.Option(help="Lengths vary by this share, in [0, 1).")] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens, of those of --lengths, with which all prompts begin alike.")
    ] = 0,
    prefix_reuse: Annotated[bool, typer.Option(help="Go on from what was computed of that beginning.")] = True,
    request_rate: Annotated[float, typer.Option(help="Arrivals per second; inf: all at once.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="1: Poisson; below: in bunches; above: evenly.")] = 1.0,
    max_concurrency: Annotated[int, typer.Option(help="Most prompts in the engine at a time; 0: no limit.")] = 0,
    goodput: Annotated[str, typer.Option(help="Limits in ms that a good request keeps, as ttft:500,tpot:50.")] = "",
    top_p: Annotated[str, typer.Option(help="Settings to measure beside dense.")] = "0.7",
    drop_layers: options.DropLayersOption = "auto",
    dropped_tokens: options.DroppedTokensOption = DEFAULTS.dropped_tokens,
    prefill_chunk: Annotated[int, typer.Option(help="Most prompt tokens of one step.")] = 2048,
    max_running: Annotated[int, typer.Option(help="Most requests admitted at a time.")] = 64,
    pool_gib: Annotated[float, typer.Option(help="Memory of the page pool.")] = 8.0,
    interference: Annotated[
        str, typer.Option(help="Also RUNNING:SHORT:LONG, such as 16:512:131072: a long prompt among running ones.")
    ] = "",
    decoding: Annotated[
        str, typer.Option(help="Also RUNNING:LENGTH, such as 64:4096: a decode step, and the host's part in it.")
    ] = "",
    dtype: options.DataTypeOption = "auto",
    seed: int = 0,
    json_path: options.JsonOption = None,
    tensor_parallel_size: devices.TensorParallelOption = None,
    distributed: devices.DistributedOption = False,
    coordinator_address: devices.CoordinatorAddressOption = None,
    num_processes: devices.NumProcessesOption = None,
    process_id: devices.ProcessIdOption = None,
) -> None:
    """The engine under load: tokens per second, latencies, pages held; dense and dropping on the same requests."""
    options.check_output(json_path)
    cells = [] if lengths == "none" else _cells(lengths, batches)
    limits = _goodput(goodput)
    disturbance = options.numbers("--interference", interference.replace(":", ","), int) if interference else []
    steps = options.numbers("--decoding", decoding.replace(":", ","), int) if decoding else []
    if len(steps) not in (0, 2):
        raise InputError(f"--decoding is {decoding!r}; use RUNNING:LENGTH")
    if len(disturbance) not in (0, 3):
        raise InputError(f"--interference is {interference!r}; use RUNNING:SHORT:LONG")
    if not (cells or steps or disturbance):
        raise InputError("--lengths is none and nothing else is asked for; give --decoding or --interference")
    if not 0 <= range_ratio < 1 or request_rate <= 0 or burstiness <= 0:
        raise InputError(
            f"--range-ratio is {range_ratio}, --request-rate {request_rate}, --burstiness {burstiness}; the first must "
            "be in [0, 1), the others above 0"
        )
    if cells and random_prefix_len >= min(cells)[0]:
        raise InputError(f"--random-prefix-len is {random_prefix_len}; use less than every one of --lengths {lengths}")
    dropping = UniPrefillConfig(drop_layers=options.parse_drop_layers(drop_layers), dropped_tokens=dropped_tokens)
    configs = {"dense": UniPrefillConfig.dense()} | {
        f"top_p={value}": replace(dropping, top_p=value) for value in options.numbers("--top-p", top_p, float)
    }
    config = options.architecture(arch, model)
    from uniprefill_jax.bench import throughput as measured
    from uniprefill_jax.cache.pools import bytes_of_page
    from uniprefill_jax.config import EngineConfig

    with ExitStack() as open_now:
        where = open_now.enter_context(
            devices.open_devices(tensor_parallel_size, distributed, coordinator_address, num_processes, process_id)
        )
        data_type = options.resolve_dtype(dtype)
        llm = options.open_model(model, config, data_type, where.mesh)
        tp = 1 if where.mesh is None else where.mesh.size
        longest = max(
            [
                *(math.ceil(length * (1 + range_ratio)) + output_len * 2 for length, _ in cells),
                *disturbance[2:],
                *(n + measured.DECODED_TOKENS for n in steps[1:]),
            ]
        )
        engine_config = EngineConfig(
            pool_pages=int(pool_gib * 2**30 / bytes_of_page(llm.config, EngineConfig().page_size, llm.dtype)),
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            max_length=min(longest, llm.config.max_position),
            prefix_reuse=prefix_reuse,
        )
        engine = open_now.enter_context(devices.open_engine(llm, engine_config))
        if engine is None:
            return
        add = _row_writer(json_path)

        def labels(length: int, batch: int, method: str) -> dict[str, Any]:
            return {"arch": arch or model, "n": length, "batch": batch, "tp": tp, "dtype": data_type, "method": method}

        if steps:  # its own first round compiles what it needs
            running, length = steps
            for method, setting in configs.items():
                row = measured.decoding(engine, running, length, setting, seed)
                add(labels(length, running, f"{method}, decoding") | row)
        for setting in configs.values() if cells or disturbance else ():
            measured.rehearse(engine, setting)
        for length, batch in cells:
            # The engine would go through them one after another all the same, but not as one batch.
            if length * batch > engine.scheduler.longest_request():
                print(
                    f"left out: {batch} prompts of {length} tokens do not fit --pool-gib {pool_gib:g}", file=sys.stderr
                )
                continue
            load = measured.Load(
                batch,
                length - random_prefix_len,
                output_len,
                range_ratio,
                request_rate,
                burstiness,
                max_concurrency or None,
                seed,
                random_prefix_len,
            )
            dense_rate = None
            for method, setting in configs.items():
                # What the rehearsal has not met is compiled here; of long loads few prompts meet all that there is.
                few = max(1, min(batch, WARM_UP_TOKENS // length))
                measured.run_load(engine, replace(load, num_prompts=few, request_rate=math.inf), setting)
                row = measured.run_load(engine, load, setting).row(limits)
                dense_rate = dense_rate or row["tokens_per_s"]
                row |= {"dense_tokens_per_s": dense_rate, "gain": round(row["tokens_per_s"] / dense_rate, 4)}
                add(labels(length, batch, method) | row | {"prefill_chunk": prefill_chunk})
        if disturbance:
            running, short, long = disturbance
            for method, setting in configs.items():
                row = measured.interference(engine, running, short, long, setting, seed)
                add(labels(long, running, f"{method}, interference") | {"prefill_chunk": prefill_chunk} | row)


@bench.command()
def kernels(
    only: Annotated[
        str,
        typer.Option(
            help="Some of drop, causal_attention, chunk_attention, block_sparse_attention, paged_attention, "
            "gated_delta_rule, grouped_matmul."
        ),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Short inputs and fewer repeats, as on CPUs always.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the random inputs; by default another one each time.")
    ] = None,
    json_path: options.JsonOption = None,
) -> None:
    """Single kernels against their references, their rivals, and the least time that the hardware needs."""
    options.check_output(json_path)
    from uniprefill_jax.bench.kernel_times import BENCHMARKS
    from uniprefill_jax.bench.kernel_times.conditions import Conditions

    chosen = only.split(",") if only else list(BENCHMARKS)
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        raise InputError(f"--only names {unknown[0]!r}; use some of {', '.join(BENCHMARKS)}")
    add = _row_writer(json_path)
    conditions = Conditions.of_this_device(time.time_ns() % (1 << 31) if seed is None else seed, quick)
    add(conditions.ceilings_row())
    for name in chosen:
        BENCHMARKS[name](conditions, add)


@bench.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with result files, such as benchmarks/results.")],
    html: Annotated[Path, typer.Option("--html", help="Write the page to this file.")],
) -> None:
    """One page with plots and tables of all result files in FOLDER; what cannot be shown is named."""
    options.check_output(html, "--html")
    if find_spec("matplotlib") is None:
        raise InputError('the plots need matplotlib; install "uniprefill-jax[plots]"')
    from uniprefill_jax.bench.report import build_report

    page, unreadable = build_report(folder)
    html.write_text(page, encoding="utf-8")
    for entry in unreadable:
        print(f"not shown: {entry.name}: {entry.reason}", file=sys.stderr)
    print(f"wrote {html}")


def _row_writer(json_path: Path | None) -> Callable[[dict[str, Any]], None]:
    """A function that prints a row, and writes it and all before it: a run cut short still leaves what it measured."""
    from uniprefill_jax.result_file import write_result

    table: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        table.append(row)
        print(json.dumps(row), flush=True)
        if json_path is not None:
            write_result(json_path, " ".join(["uniprefill", *sys.argv[1:]]), table)

    return add


def _goodput(text: str) -> dict[str, float]:
    limits = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise InputError(f"--goodput names {name!r}; use ttft, tpot or e2el, as in ttft:500,tpot:50")
        limits[name] = options.numbers("--goodput", value, float)[0]
    return limits


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
