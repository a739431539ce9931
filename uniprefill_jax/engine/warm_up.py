"""Compile ahead what requests will need, so that the first ones do not wait for the compiler.

Programs depend on the size of a prompt's row buffer, on the padded size of a chunk, and on how tokens are drawn. Short
rehearsals go through all of these combinations, with the step's token budget set to each chunk size in turn; top_p is
traced, so that one close to 1, at which every later stage sees as many rows as the first, stands for all. Some prompts
come again, to go on from what the prefix cache keeps of them; some come together, to share chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from uniprefill_jax.cache.pools import linear_layers
from uniprefill_jax.config import SamplingConfig, UniPrefillConfig
from uniprefill_jax.engine.engine import Engine
from uniprefill_jax.engine.executor import buffer_sizes

KEEPS_ALL = 0.9999999  # as top_p: drops next to nothing, and runs what a setting that drops runs
# Every kind of draw there is: greedy, from all tokens, from the likeliest ones.
_DRAWS = (
    SamplingConfig(ignore_eos=True),
    SamplingConfig(ignore_eos=True, temperature=1.0),
    SamplingConfig(ignore_eos=True, temperature=1.0, top_k=2),
)


@dataclass(frozen=True)
class Rehearsal:
    """Requests that make the engine compile something: their prompts' lengths, the step's budget, and their settings.

    They are put together, and that `times` times, one after the other.
    """

    lengths: tuple[int, ...]
    budget: int
    config: UniPrefillConfig
    sampling: SamplingConfig
    logprobs: int | None
    times: int


def rehearsals(engine: Engine, config: UniPrefillConfig, longest: int) -> list[Rehearsal]:
    """What has to be gone through for prompts of up to `longest` tokens, dense and shortened as `config` says."""
    configs = [UniPrefillConfig.dense()]
    if not config.is_dense:
        configs.append(replace(config, top_p=KEEPS_ALL))
    # A recurrent state is kept when a prompt comes for the second time, and restored at the third.
    again = 0 if engine.scheduler.prefix is None else 2 if linear_layers(engine.llm.config) else 1
    chunks = engine.executor.chunk_sizes
    drawn: set[int] = set()
    found = []
    for rows in buffer_sizes(longest, engine.config.page_size):
        length = min(rows // 2 + 1, longest)
        for smaller, chunk in zip((0, *chunks), chunks, strict=False):
            if length <= smaller:
                continue
            budget = min(chunk, engine.config.prefill_chunk)
            # How the first token is drawn depends on the chunk it comes from, not on the buffer.
            draws = _DRAWS if chunk not in drawn else _DRAWS[:1]
            # And decode steps depend on neither: the first of these requests go through all of them.
            reports, tokens = ((None,), 1) if drawn else ((None, 0), 2)
            drawn.add(chunk)
            found += [
                Rehearsal(
                    (length,),
                    budget,
                    own,
                    replace(sampling, max_tokens=tokens),
                    logprobs,
                    times=1 + again * (smaller == 0 and sampling is _DRAWS[0]),
                )
                for own in configs
                for sampling in draws
                for logprobs in reports
            ]
    sampling = replace(_DRAWS[0], max_tokens=1)
    for chunk in chunks:
        budget = min(chunk, engine.config.prefill_chunk)
        lengths = _together(buffer_sizes(longest, engine.config.page_size), budget)
        if len(lengths) <= engine.config.max_running:
            found += [Rehearsal(lengths, budget, own, sampling, None, times=1) for own in configs]
    return found


def _together(sizes: Sequence[int], rows: int) -> tuple[int, ...]:
    """Lengths of prompts that together fill a chunk of so many rows from more than half: a prompt of every buffer size
    that there is room for."""
    lengths: list[int] = []
    for size in sizes:
        if sum(lengths) + size // 2 + 1 <= rows:
            lengths.append(size // 2 + 1)
    left = rows - sum(lengths)
    return (*lengths, left) if left else tuple(lengths)


def warm_up(
    engine: Engine,
    config: UniPrefillConfig,
    longest: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compile every program that prompts of up to `longest` tokens need; None: the longest there may be.

    `progress` is called with rehearsals done and in all. The engine must have no requests, and has none afterwards.
    """
    most = engine.most_tokens(1)
    planned = rehearsals(engine, config, min(longest or most, most - 1))
    try:
        for number, rehearsal in enumerate(planned):
            if progress is not None:
                progress(number, len(planned))
            engine.limit_step(rehearsal.budget)
            engine.forget_prefixes()
            for _ in range(rehearsal.times):
                for place, length in enumerate(rehearsal.lengths):
                    # No two begin alike: one would wait for what the other leaves.
                    prompt = np.arange(place, place + length) % engine.llm.config.vocab_size
                    sampling, logprobs = rehearsal.sampling, rehearsal.logprobs
                    engine.submit(prompt.tolist(), rehearsal.config, sampling, logprobs=logprobs)
                while engine.has_work:
                    engine.step()
    finally:
        engine.limit_step()
        engine.forget_prefixes()
    if progress is not None:
        progress(len(planned), len(planned))
