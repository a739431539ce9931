"""What runs on several meshes have to agree on."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import uniprefill_jax as up
from tests.parity.compare import relative_error
from uniprefill_jax.engine.requests import PrefillReport
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers

LENGTHS = (170, 60, 15, 1)
ENGINE = up.EngineConfig(page_size=16, pool_pages=200, max_running=4, prefill_chunk=64, max_length=256)
SAMPLING = up.SamplingConfig(max_tokens=6)


class Difference(NamedTuple):
    """A kept set that differs, and how far from the cut each run was."""

    request: int
    layer: int
    margins: tuple[float, float]


def prompts_of(lengths: Sequence[int], seed: int = 0, vocabulary: int = 128) -> list[list[int]]:
    """Random token ids in stretches of few distinct ones, so that blocks differ in what they attract."""
    random = np.random.default_rng(seed)
    prompts = []
    for length in lengths:
        stretches = [random.choice(random.integers(0, vocabulary, size=4), 12) for _ in range(-(-length // 12))]
        prompts.append(np.concatenate(stretches)[:length].tolist())
    return prompts


def ragged_batches(llm: up.LLM, config: up.UniPrefillConfig, count: int) -> Iterator[list[list[int]]]:
    """Random batches that run on the program of `LENGTHS`."""
    random = np.random.default_rng(11)
    drops = resolve_drop_layers(config, llm.config)

    def plan(lengths: Sequence[int]) -> PrefillPlan:
        return PrefillPlan.for_batch(llm.config, config, drops, lengths, np.dtype(np.float32))

    wanted, made = plan(LENGTHS), 0
    while made < count:
        lengths = random.integers(1, max(LENGTHS) + 22, size=int(random.integers(3, 5))).tolist()
        if plan(lengths) == wanted:
            made += 1
            yield prompts_of(lengths, seed=made)


def served(llm: up.LLM, config: up.UniPrefillConfig) -> tuple[list[list[int]], list[PrefillReport], up.Engine]:
    """The prompts of `LENGTHS` through an engine, all at once: tokens and reports of each, and the engine."""
    engine = up.Engine(llm, ENGINE)
    requests = [engine.submit(prompt, config, SAMPLING, report=True) for prompt in prompts_of(LENGTHS)]
    streams: dict[int, list[int]] = {request: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            if event.kind == "token":
                streams[event.request_id].append(event.token)
    return list(streams.values()), [engine.take_report(request) for request in requests], engine


def differences(
    ours: Sequence[up.PrefillResult | PrefillReport], theirs: Sequence[up.PrefillResult]
) -> list[Difference]:
    """Kept sets that are not equal."""
    found = []
    for request, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for layer, kept in one.kept_positions.items():
            if not np.array_equal(kept, other.kept_positions[layer]):
                found.append(Difference(request, layer, (one.cut_margin[layer], other.cut_margin[layer])))
    return found


def logit_error(ours: Sequence[up.PrefillResult | PrefillReport], theirs: Sequence[up.PrefillResult]) -> float:
    """Largest relative error of the last token's logits."""
    return max(relative_error(one.logits, other.logits) for one, other in zip(ours, theirs, strict=True))


def as_json(result: up.PrefillResult | PrefillReport) -> dict[str, Any]:
    """What another process can compare."""
    return {
        "kept": {str(layer): kept.tolist() for layer, kept in result.kept_positions.items()},
        "cut_margin": {str(layer): margin for layer, margin in result.cut_margin.items()},
        "logits": result.logits.tolist(),
    }
