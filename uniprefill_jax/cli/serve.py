"""`uniprefill serve`: an OpenAI-compatible HTTP server over one model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from uniprefill_jax.cli import devices, options
from uniprefill_jax.cli.reading import reading
from uniprefill_jax.config import EngineConfig, UniPrefillConfig
from uniprefill_jax.errors import ConfigError

if TYPE_CHECKING:
    from uniprefill_jax.engine.engine import Engine
    from uniprefill_jax.models.config import ModelConfig

ENGINE = "Engine"
LIMITS = "Limits"
DEFAULTS = UniPrefillConfig()
ENGINE_DEFAULTS = EngineConfig()


def serve(
    context: typer.Context,
    model: options.ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; by default MODEL itself.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Require one of the keys in this file, one per line; without it all may ask.")
    ] = None,
    dtype: options.DataTypeOption = "auto",
    warmup: Annotated[
        bool, typer.Option("--warmup", help="Compile everything first and measure from which length dropping pays.")
    ] = False,
    warmup_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt to compile for; by default the longest there may be.")
    ] = None,
    dense_below: Annotated[
        int | None,
        typer.Option(min=0, help="Prompts shorter than this drop nothing; by default what --warmup has measured."),
    ] = None,
    profile_folder: Annotated[
        Path | None, typer.Option(help="Switch /profile/start and /stop on; traces go here.")
    ] = None,
    max_length: Annotated[
        int, typer.Option(min=1, help="Most tokens of a request, prompt and answer.", rich_help_panel=ENGINE)
    ] = ENGINE_DEFAULTS.max_length,
    max_running: Annotated[
        int, typer.Option(min=1, help="Most sequences generated at a time.", rich_help_panel=ENGINE)
    ] = ENGINE_DEFAULTS.max_running,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens read per step.", rich_help_panel=ENGINE)
    ] = ENGINE_DEFAULTS.prefill_chunk,
    page_size: Annotated[
        int, typer.Option(help="Tokens per page of the cache.", rich_help_panel=ENGINE)
    ] = ENGINE_DEFAULTS.page_size,
    cache_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the cache holds when nothing is dropped.", rich_help_panel=ENGINE),
    ] = None,
    prefix_reuse: Annotated[
        bool,
        typer.Option(
            help="Go on from what was computed for prompts that began alike, as far as no token was dropped.",
            rich_help_panel=ENGINE,
        ),
    ] = ENGINE_DEFAULTS.prefix_reuse,
    state_checkpoints: Annotated[
        int,
        typer.Option(min=0, help="Recurrent states kept for that, for models that have some.", rich_help_panel=ENGINE),
    ] = ENGINE_DEFAULTS.state_checkpoints,
    max_waiting: Annotated[
        int, typer.Option(help="Most waiting sequences; more get 429.", rich_help_panel=LIMITS)
    ] = 1024,
    max_body_mib: Annotated[int, typer.Option(help="Longest body of a request, MiB.", rich_help_panel=LIMITS)] = 8,
    request_timeout: Annotated[float, typer.Option(help="Seconds per request.", rich_help_panel=LIMITS)] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.", rich_help_panel=LIMITS)
    ] = 60.0,
    tensor_parallel_size: devices.TensorParallelOption = None,
    distributed: devices.DistributedOption = False,
    coordinator_address: devices.CoordinatorAddressOption = None,
    num_processes: devices.NumProcessesOption = None,
    process_id: devices.ProcessIdOption = None,
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
) -> None:
    """Serve MODEL over HTTP as OpenAI's API does: completions, chats, streams; metrics at /metrics.

    SIGTERM or Ctrl+C lets running requests finish. Logs are JSON lines on standard error. With --distributed the first
    process serves.
    """
    config = options.make_config(
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
    engine_config = EngineConfig(
        page_size=page_size,
        max_running=max_running,
        prefill_chunk=prefill_chunk,
        max_length=max_length,
        prefix_reuse=prefix_reuse,
        state_checkpoints=state_checkpoints,
    )
    try:
        from uniprefill_jax.serve.logs import configure_logging
        from uniprefill_jax.serve.server import check_address
        from uniprefill_jax.serve.server import serve as run_server
        from uniprefill_jax.serve.settings import ServerSettings, read_api_keys
    except ModuleNotFoundError as error:
        message = f"the server needs {error.name}, which is not installed; install uniprefill-jax[serve]"
        raise ConfigError(message) from None
    settings = ServerSettings(
        model_name=name or model,
        host=host,
        port=port,
        api_keys=() if api_key_file is None else read_api_keys(api_key_file),
        max_body_bytes=max_body_mib * 2**20,
        max_waiting=max_waiting,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        profile_folder=profile_folder,
    )
    from uniprefill_jax.llm import LLM

    with devices.open_devices(
        tensor_parallel_size, distributed, coordinator_address, num_processes, process_id
    ) as where:
        if where.speaks:
            check_address(settings)
        console = Console(stderr=True, quiet=not where.speaks)
        with reading(console, model) as progress:
            llm = LLM.load(model, dtype=options.resolve_dtype(dtype), mesh=where.mesh, progress=progress)
        config = options.own_setting(console, context, config, llm)
        if cache_tokens is not None:
            engine_config = replace(engine_config, pool_pages=_pages(llm.config, cache_tokens, page_size))
        with devices.open_engine(llm, engine_config) as engine:
            if engine is None:
                return
            if warmup:
                _warm_up(console, engine, config, warmup_tokens)
            if dense_below is None:
                dense_below = _remembered(console, engine, config)
            configure_logging()
            run_server(engine, replace(settings, uniprefill=config, dense_below=dense_below))


def _pages(model: "ModelConfig", tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens in every attention layer."""
    from uniprefill_jax.cache.pools import attention_layers
    from uniprefill_jax.cache.tables import pages_of

    return len(attention_layers(model)) * pages_of(tokens, page_size)


def _warm_up(console: Console, engine: "Engine", config: UniPrefillConfig, longest: int | None) -> None:
    """Compile ahead, and measure from which length dropping pays; the result is remembered."""
    from uniprefill_jax.engine.break_even import measure_break_even, store_break_even
    from uniprefill_jax.engine.warm_up import warm_up

    with _progress(console, "Compiling") as progress:
        warm_up(engine, config, longest, progress)
    if config.is_dense:
        return
    with _progress(console, "Measuring dense against dropping") as progress:
        found = measure_break_even(engine, config, longest, progress)
    for timing in found.timings:
        console.print(
            f"  {timing.tokens:>7,} tokens: first token after {timing.dense_seconds:.3f} s dense, "
            f"{timing.dropping_seconds:.3f} s dropping",
            highlight=False,
        )
    path = store_break_even(engine, config, found)
    console.print(f"  remembered in {path}", style="dim", highlight=False, soft_wrap=True)


def _remembered(console: Console, engine: "Engine", config: UniPrefillConfig) -> int:
    """The length below which prompts are left whole, as measured before; 0 where nothing was."""
    from uniprefill_jax.engine.break_even import stored_break_even

    if config.is_dense:
        return 0
    found = stored_break_even(engine, config)
    if found is None:
        console.print("Dropping at every length: --warmup would measure where it pays.", style="dim")
        return 0
    console.print(f"Prompts below {found.dense_below:,} tokens drop nothing, as measured here.", style="dim")
    return found.dense_below


@contextmanager
def _progress(console: Console, text: str) -> Iterator[Callable[[int, int], None]]:
    if not console.is_terminal:
        yield lambda done, total: console.print(f"{text}: {done} of {total}", highlight=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
