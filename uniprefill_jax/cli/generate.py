"""`uniprefill generate`: continue a prompt or answer a message."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from uniprefill_jax.cli import devices, options, prompts
from uniprefill_jax.cli.reading import reading
from uniprefill_jax.config import SamplingConfig, UniPrefillConfig
from uniprefill_jax.errors import InputError

if TYPE_CHECKING:
    from uniprefill_jax.results import Completion
    from uniprefill_jax.sparsify.methods.protocol import Method

SAMPLING = "Sampling"
DEFAULTS = UniPrefillConfig()


def generate(
    context: typer.Context,
    model: options.ModelArgument,
    prompt: prompts.PromptOption = None,
    prompt_file: prompts.PromptFileOption = None,
    chat: prompts.ChatOption = None,
    stream: Annotated[bool, typer.Option(help="Print the text while it is generated.")] = False,
    dtype: options.DataTypeOption = "auto",
    json: options.JsonOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: all.", rich_help_panel=SAMPLING)] = 0,
    sampling_top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens up to this probability.", rich_help_panel=SAMPLING)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.", rich_help_panel=SAMPLING)] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.", rich_help_panel=SAMPLING)
    ] = None,
    dense: options.DenseOption = False,
    top_p: options.TopPOption = DEFAULTS.top_p,
    block_size: options.BlockSizeOption = DEFAULTS.block_size,
    drop_layers: options.DropLayersOption = "auto",
    dropped_tokens: options.DroppedTokensOption = DEFAULTS.dropped_tokens,
    sliding_window: options.SlidingWindowOption = DEFAULTS.sliding_window,
    cut: options.CutOption = DEFAULTS.cut,
    score: options.ScoreOption = DEFAULTS.score,
    score_memory: options.ScoreMemoryOption = DEFAULTS.score_memory,
    top_p_over: options.TopPOverOption = DEFAULTS.top_p_over,
    method: options.MethodOption = "",
    tensor_parallel_size: devices.TensorParallelOption = None,
    distributed: devices.DistributedOption = False,
    coordinator_address: devices.CoordinatorAddressOption = None,
    num_processes: devices.NumProcessesOption = None,
    process_id: devices.ProcessIdOption = None,
) -> None:
    """Generate text from MODEL; the text goes to standard output, everything else to standard error."""
    config: "UniPrefillConfig | Method" = options.make_config(
        dense=dense,
        top_p=top_p,
        block_size=block_size,
        drop_layers=drop_layers,
        dropped_tokens=dropped_tokens,
        sliding_window=sliding_window,
        cut=cut,
        score=score,
        score_memory=score_memory,
        top_p_over=top_p_over,
    )
    if method:
        if options.names_setting(context):
            raise InputError("--method and the options of dropping exclude each other; write uniprefill:top_p=0.9")
        from uniprefill_jax.sparsify.methods.protocol import Method

        config = Method.parse(method)
    sampling = SamplingConfig(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=sampling_top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    options.check_output(json)
    if stream and json is not None:
        raise InputError("--json measures a whole run, which --stream does not give; leave one of them out")
    text = prompts.read_prompt(prompt, prompt_file)
    with devices.open_devices(
        tensor_parallel_size, distributed, coordinator_address, num_processes, process_id
    ) as where:
        _generate(context, model, text, chat, options.resolve_dtype(dtype), config, sampling, stream, json, where)


def _generate(
    context: typer.Context,
    model: str,
    text: str,
    chat: bool | None,
    dtype: str,
    config: "UniPrefillConfig | Method",
    sampling: SamplingConfig,
    stream: bool,
    json: Path | None,
    where: devices.Devices,
) -> None:
    """Load, run and print; of several processes only the first prints."""
    from uniprefill_jax.llm import LLM

    console = Console(stderr=True, quiet=not where.speaks)
    with reading(console, model) as progress:
        llm = LLM.load(model, dtype=dtype, mesh=where.mesh, progress=progress)
    if isinstance(config, UniPrefillConfig):
        config = options.own_setting(console, context, config, llm)
    token_ids = prompts.tokenize(llm, model, text, chat)
    if stream:
        for _, piece in llm.stream(token_ids, config, sampling):
            if where.speaks:
                print(piece, end="", flush=True)
        if where.speaks:
            print()
        return
    with console.status(f"Compiling for, and reading, {len(token_ids):,} tokens"):
        completion = llm.generate([token_ids], config, sampling)[0]
    _report(console, completion)
    if where.speaks:
        print(completion.text)
        if json is not None:
            _write(json, model, completion)


def _report(console: Console, completion: "Completion") -> None:
    prefill = completion.prefill
    kept = " > ".join(f"{length:,}" for length in prefill.segment_lengths)
    console.print(
        f"prompt tokens per segment {kept}; prefill {prefill.seconds:.2f} s "
        f"(compiled in {prefill.compile_seconds:.1f} s); {len(completion.token_ids)} tokens, "
        f"ended by {completion.finish_reason}",
        style="dim",
        highlight=False,
    )


def _write(path: Path, model: str, completion: "Completion") -> None:
    from uniprefill_jax.result_file import write_result

    prefill = completion.prefill
    row = {
        "arch": model,
        "n": prefill.segment_lengths[0],
        "batch": 1,
        "kept": list(prefill.segment_lengths),
        "ttft_ms": 1e3 * prefill.seconds,
        "compile_s": prefill.compile_seconds,
        "ideal_speedup": prefill.ideal_speedup,
        "flop_fraction": prefill.flop_fraction,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    write_result(path, "generate", [row])
