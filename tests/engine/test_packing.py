"""Rows of several requests in one chunk: everybody gets what it gets alone, also when others leave in the middle."""

from dataclasses import replace

import numpy as np
import pytest

import uniprefill_jax as up
from tests.engine.tiny import CONFIG, DROPPING, poisoned_engine, prompt, run, tiny
from tests.parity.compare import relative_error
from uniprefill_jax.engine.scheduler import MOST_MEMBERS

DENSE = up.UniPrefillConfig.dense()
WIDE = replace(CONFIG, prefill_chunk=256, max_running=8)
GREEDY = up.SamplingConfig(max_tokens=4, ignore_eos=True)
# As in test_chunked_prefill.py: the recurrent model amplifies float32 rounding.
LIMITS = {"llama": 1e-5, "gemma3": 1e-5, "qwen3_next": 5e-5}
LENGTHS = (30, 1, 100, 65, 17, 128, 33, 90)


def count_members(engine: up.Engine) -> list[int]:
    """From now on, the number of requests in every unit that the engine runs."""
    counts: list[int] = []
    run_unit = engine.executor.run

    def counting(unit):
        counts.append(len(unit.pieces))
        return run_unit(unit)

    engine.executor.run = counting
    return counts


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama", "discard"),
        pytest.param("llama", "carry", marks=pytest.mark.slow),
        pytest.param("gemma3", "discard", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "discard", marks=pytest.mark.slow),
    ],
)
def test_packed_requests_equal_each_alone(family, mode):
    llm = tiny(family)
    config = replace(DROPPING, dropped_tokens=mode)
    configs = [*[config, replace(config, top_p=0.4)] * 3, DENSE, DENSE]
    prompts = [prompt(length, number) for number, length in enumerate(LENGTHS)]
    engine, alone = poisoned_engine(llm, WIDE), poisoned_engine(llm, replace(CONFIG, prefix_reuse=False))
    members = count_members(engine)
    numbers = [engine.submit(*pair, GREEDY, report=True) for pair in zip(prompts, configs, strict=True)]
    tokens = run(engine)
    assert max(members) >= 3
    for number, *pair in zip(numbers, prompts, configs, strict=True):
        own = alone.submit(*pair, GREEDY, report=True)
        assert run(alone)[own] == tokens[number]
        report, wanted = engine.take_report(number), alone.take_report(own)
        assert relative_error(report.logits, wanted.logits) <= LIMITS[family]
        for layer, kept in wanted.kept_positions.items():
            np.testing.assert_array_equal(report.kept_positions[layer], kept)


def test_who_leaves_a_chunk_leaves_nothing_behind():
    """Small budgets make chunks wait between the parts of a stage; some of their requests are cancelled there."""
    llm = tiny("llama")
    prompts = [prompt(length, 40 + number) for number, length in enumerate((40, 30, 60, 25))]
    alone = poisoned_engine(llm, replace(CONFIG, prefix_reuse=False))
    wanted = []
    for tokens in prompts:
        number = alone.submit(tokens, DENSE, GREEDY)
        wanted.append(run(alone)[number])
    for gone in ((0,), (1, 2), (0, 1, 2)):
        engine = poisoned_engine(llm, WIDE)
        members = count_members(engine)
        engine.scheduler.budget = 160
        numbers = [engine.submit(tokens, DENSE, GREEDY) for tokens in prompts]
        engine.step()
        assert members == [4], "the chunk has gone through all of its parts"
        for number in gone:
            assert engine.cancel(numbers[number])
        tokens = run(engine)
        assert tokens == {numbers[n]: wanted[n] for n in range(4) if n not in gone}
        assert not engine.executor._packed


def test_tiny_prompts_take_few_units():
    engine = poisoned_engine(tiny("llama"), replace(WIDE, max_running=20))
    members = count_members(engine)
    for number in range(20):
        engine.submit(prompt(5 + number % 3, number), DENSE, GREEDY)
    run(engine)
    assert members[0] == MOST_MEMBERS and sum(members) == 20 * len(members) // 2
