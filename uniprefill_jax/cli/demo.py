"""`uniprefill demo`: a question to a long document, dense and with UniPrefill, on real packaged weights."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from uniprefill_jax.cli.options import DataTypeOption, JsonOption, check_output, resolve_dtype
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError

WRONG_ANSWER_EXIT_CODE = 1
# Finds the fact at more depths than the published rule does, with less work (README).
PEAK_WITH_MEMORY = UniPrefillConfig(top_p=0.8, score="peak", score_memory=0.5, top_p_over="candidates")


def demo(
    model: Annotated[
        str, typer.Option(help="smollm2-135m, gemma-3-270m, qwen3-next-needles, or the path of a model.")
    ] = "smollm2-135m",
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Share of the score that stays; by default 0.8, published 0.99.")
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="Select by the published rule, mean scores.")] = False,
    depth: Annotated[float, typer.Option(min=0, max=1, help="Where in the document the fact is planted.")] = 0.6,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each method; the median counts.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    dtype: DataTypeOption = "auto",
    json: JsonOption = None,
) -> None:
    """Ask a long document for a planted fact and compare the time to the first token of the answer.

    Exit code 1 when one of the two answers lacks the fact.
    """
    check_output(json)
    config = UniPrefillConfig() if published else PEAK_WITH_MEMORY
    if top_p is not None:
        config = replace(config, top_p=top_p)
    if not _compare(model, config, depth, runs, max_tokens, resolve_dtype(dtype), json):
        raise typer.Exit(WRONG_ANSWER_EXIT_CODE)


def _compare(
    model: str, config: UniPrefillConfig, depth: float, runs: int, max_tokens: int, dtype: str, json: Path | None
) -> bool:
    """Load, run, print and write; whether both answers contain the fact."""
    console = Console()
    console.print(f"UniPrefill demo: {model}, {dtype}", style="bold", highlight=False)
    from uniprefill_jax.demo.comparison import compare
    from uniprefill_jax.demo.display import print_comparison, progress_steps
    from uniprefill_jax.demo.document import QUESTION, build_prompt
    from uniprefill_jax.llm import LLM

    step = progress_steps(console)
    with step("Loading the weights"):
        llm = LLM.load(model, dtype=dtype)
    if llm.tokenizer is None:
        raise InputError(f"{model} comes without a tokenizer, which the demo's document needs; name another model")
    with step("Reading the document"):
        prompt = build_prompt(llm.tokenizer, depth)
    length = len(prompt.token_ids)
    console.print(f"  A prompt of {length:,} tokens, with a number planted at token {prompt.fact_position:,}.")
    console.print(f"  {QUESTION}", style="italic")
    comparison = compare(llm, prompt.token_ids, config, runs=runs, max_tokens=max_tokens, step=step)
    print_comparison(console, comparison, prompt.fact_position)
    if json is not None:
        from uniprefill_jax.result_file import write_result

        write_result(json, "demo", comparison.rows(model, dtype))
    return comparison.dense.is_right and comparison.uniprefill.is_right
