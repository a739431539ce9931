"""`uniprefill explain`: what was kept of a prompt, as a page and a picture."""

import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from uniprefill_jax.cli import options, prompts
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError

if TYPE_CHECKING:
    from uniprefill_jax.explain.gather import Mark
    from uniprefill_jax.llm import LLM

DEFAULTS = UniPrefillConfig()
DEMO_DEPTH = 0.6


def explain(
    context: typer.Context,
    model: options.ModelArgument,
    html: Annotated[Path, typer.Option("--html", help="Write the page to this file.")],
    png: Annotated[Path | None, typer.Option("--png", help="Also write the heat map to this file.")] = None,
    prompt: prompts.PromptOption = None,
    prompt_file: prompts.PromptFileOption = None,
    demo: Annotated[bool, typer.Option("--demo", help="Use the demo's document and question.")] = False,
    chat: prompts.ChatOption = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each method; the median counts.")] = 3,
    dtype: options.DataTypeOption = "auto",
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
    """Show which parts of a prompt MODEL kept, how deep each part got, and what that saved."""
    config = options.make_config(
        dense=False,
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
    options.check_output(html, "--html")
    options.check_output(png, "--png")
    if png is not None and find_spec("matplotlib") is None:
        raise InputError('--png needs matplotlib; install "uniprefill-jax[plots]" or leave it out')
    if demo and (prompt is not None or prompt_file is not None or chat is not None):
        raise InputError("--demo brings its own prompt; leave out --prompt, --prompt-file and --chat")
    text = None if demo else prompts.read_prompt(prompt, prompt_file)
    console = Console(stderr=True)
    from uniprefill_jax.demo.display import progress_steps
    from uniprefill_jax.explain.gather import explain_prefill
    from uniprefill_jax.explain.measure import measure
    from uniprefill_jax.explain.page import Provenance, explanation_page
    from uniprefill_jax.explain.text import token_pieces
    from uniprefill_jax.llm import LLM
    from uniprefill_jax.result_file import device_name, installed_versions

    step = progress_steps(console)
    with step(f"Loading {model}"):
        llm = LLM.load(model, dtype=options.resolve_dtype(dtype))
    config = options.own_setting(console, context, config, llm)
    token_ids, marks = _demo_prompt(llm, model) if text is None else (prompts.tokenize(llm, model, text, chat), [])
    assert llm.tokenizer is not None
    result, timing = measure(llm, token_ids, config, runs=runs, step=step)
    explanation = explain_prefill(result, token_pieces(llm.tokenizer, token_ids), config, marks)
    provenance = Provenance(
        model=model,
        command=" ".join(["uniprefill", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device_name(),
        versions=installed_versions(),
    )
    html.write_text(explanation_page(explanation, timing, provenance, marks), encoding="utf-8")
    if png is not None:
        from uniprefill_jax.explain.picture import save_picture

        save_picture(png, explanation, timing, model, marks)
    console.print(
        f"  {explanation.kept_to_the_end:.0%} of {explanation.num_tokens:,} tokens stay to the end; ideal "
        f"{result.ideal_speedup:.2f}x, measured {timing.speedup:.2f}x",
        highlight=False,
    )
    for path in filter(None, (html, png)):
        console.print(f"  wrote {path}", highlight=False, markup=False)


def _demo_prompt(llm: "LLM", model: str) -> "tuple[list[int], list[Mark]]":
    """The demo's prompt, with the planted fact marked."""
    from uniprefill_jax.demo.document import FACT, build_prompt
    from uniprefill_jax.explain.gather import Mark

    if llm.tokenizer is None:
        raise InputError(f"{model} comes without a tokenizer, which the demo's document needs; name another model")
    prompt = build_prompt(llm.tokenizer, DEMO_DEPTH)
    stop = prompt.fact_position + len(llm.tokenizer.encode(FACT, add_special_tokens=False))
    return prompt.token_ids, [Mark(prompt.fact_position, stop, "the planted fact")]
