"""Prefix reuse: what was read of another prompt serves as what would have been computed, and only where it must."""

from dataclasses import replace

import numpy as np
import pytest

import uniprefill_jax as up
from tests.engine.tiny import CONFIG, DROPPING, MODELS, SIZES, assert_nothing_held, poisoned_engine, prompt, run, tiny
from tests.parity.compare import relative_error
from uniprefill_jax.engine.requests import PrefillReport

DENSE = up.UniPrefillConfig.dense()
OFF = replace(CONFIG, prefix_reuse=False)
GREEDY = up.SamplingConfig(max_tokens=6, ignore_eos=True)
# As in test_chunked_prefill.py: the recurrent model amplifies float32 rounding.
LIMITS = {"llama": 1e-5, "gemma3": 1e-5, "qwen3_next": 5e-5}


def alone(engine: up.Engine, tokens: list[int], config: up.UniPrefillConfig) -> tuple[list[int], PrefillReport]:
    """Tokens and report of one request that has the engine to itself."""
    number = engine.submit(tokens, config, GREEDY, report=True)
    generated = run(engine)[number]
    return generated, engine.take_report(number)


def assert_same(
    given: tuple[list[int], PrefillReport], wanted: tuple[list[int], PrefillReport], limit: float = 1e-5
) -> None:
    """Equal tokens and kept sets, close logits."""
    assert given[0] == wanted[0]
    assert sorted(given[1].kept_positions) == sorted(wanted[1].kept_positions)
    for layer, kept in wanted[1].kept_positions.items():
        np.testing.assert_array_equal(given[1].kept_positions[layer], kept)
    assert relative_error(given[1].logits, wanted[1].logits) <= limit


def hits(engine: up.Engine) -> int:
    """Prompt tokens that were found so far."""
    return engine.stats().prefix_hit_tokens


@pytest.mark.parametrize("family", ["llama", "gemma3", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_reuse_changes_nothing(family):
    """Shared beginnings around page and chunk boundaries, dropping and dense requests one after the other."""
    llm, page = tiny(family), CONFIG.page_size
    engine, off = poisoned_engine(llm), poisoned_engine(llm, OFF)
    text = prompt(208, 1)
    alone(engine, text, DROPPING), alone(engine, text, DENSE)
    for number, shared in enumerate((15, 16, 17, 64, 65, 100, 127, 128, 150, 208)):
        own = text[:shared] + prompt(40, 100 + number)
        for config in (DROPPING, DENSE):
            before = hits(engine)
            given = alone(engine, own, config)
            assert_same(given, alone(off, own, config), LIMITS[family])
            found = hits(engine) - before
            if family == "qwen3_next":
                # After the first chunk, of 64 tokens, a state was kept.
                assert found % page == 0 and (shared < 64 or found >= 64)
            else:
                # Tokens that diverge may begin alike by chance.
                assert shared - page // 8 < found <= shared + 2
    assert hits(off) == 0


@pytest.mark.parametrize("config", [DROPPING, DENSE], ids=["dropping", "dense"])
def test_the_same_prompt_again(config):
    """All but the tokens that have to be computed are found, down to the middle of a page."""
    llm = tiny("llama")
    engine, off = poisoned_engine(llm), poisoned_engine(llm, OFF)
    recomputed = DROPPING.window_tokens if config is DROPPING else 1
    for length in (9, 64, 65, 190):
        tokens = prompt(length, length)
        wanted = alone(off, tokens, config)
        assert_same(alone(engine, tokens, config), wanted)
        before = hits(engine)
        assert_same(alone(engine, tokens, config), wanted)
        # Of a dropping request only whole pages are kept, of a dense one its last page too.
        most = max(length - recomputed, 0)
        kept = most if config is DENSE else min(most, length // 16 * 16)
        # One token more than whole pages is not worth copying a page.
        assert kept - 1 <= hits(engine) - before <= kept


def test_in_flight_together_with_a_cancelled_owner():
    """Requests that share a beginning run at once; the one that computed it first is cancelled while they read it."""
    llm = tiny("llama")
    off = poisoned_engine(llm, OFF)
    text = prompt(150, 3)
    prompts = [text + prompt(30, 200 + number) for number in range(4)]
    configs = (DROPPING, DENSE, DROPPING, DENSE)
    wanted = [alone(off, *pair) for pair in zip(prompts, configs, strict=True)]
    for steps in (1, 2, 3, 5, 8):
        engine = poisoned_engine(llm)
        owner = engine.submit(text + prompt(20, 300), DROPPING, GREEDY)
        numbers = [engine.submit(*pair, GREEDY, report=True) for pair in zip(prompts, configs, strict=True)]
        seen = [event for _ in range(steps) for event in engine.step()]
        assert engine.cancel(owner) or steps == 8
        events = []
        run(engine, events)
        for number, own in zip(numbers, wanted, strict=True):
            tokens = [event.token for event in seen + events if event.request_id == number and event.kind == "token"]
            assert_same((tokens, engine.take_report(number)), own)
        assert hits(engine) >= 128
        engine.forget_prefixes()
        assert engine.scheduler.pages.free_pages == CONFIG.pool_pages
        assert np.isnan(engine.executor.pools.keys).all() and np.isnan(engine.executor.pools.values).all()


def test_eviction_and_preemption_of_sharers():
    """A pool with room for little more than one request: what is kept goes when it is needed, and nothing breaks."""
    llm = tiny("llama")
    small = replace(CONFIG, pool_pages=120)
    engine, off = poisoned_engine(llm, small), poisoned_engine(llm, OFF)
    texts = [prompt(100, 20 + number) for number in range(3)]
    jobs = [(texts[n // 4] + prompt(10 + n, 400 + n), (DROPPING, DENSE)[n // 2 % 2]) for n in range(12)]
    sampling = up.SamplingConfig(max_tokens=40)
    wanted = {}
    for tokens, config in jobs:
        number = off.submit(tokens, config, sampling)
        wanted[number] = run(off)[number]
    numbers = [engine.submit(*job, sampling) for job in jobs]
    tokens = run(engine)
    assert [tokens[number] for number in numbers] == list(wanted.values())
    assert engine.stats().preemptions and hits(engine) > 100
    engine.forget_prefixes()
    assert engine.scheduler.pages.free_pages == small.pool_pages


def test_what_an_answer_added_is_found_too():
    """The next turn of a chat: the prompt, the answer, and something new."""
    llm = tiny("llama")
    engine, off = poisoned_engine(llm), poisoned_engine(llm, OFF)
    turn = prompt(100, 9)
    number = engine.submit(turn, DENSE, up.SamplingConfig(max_tokens=40, ignore_eos=True))
    follow_up = turn + run(engine)[number] + prompt(20, 10)
    given = alone(engine, follow_up, DENSE)
    assert_same(given, alone(off, follow_up, DENSE))
    # The last token of the answer was never fed back.
    assert hits(engine) == 139


def test_recurrent_states_are_kept_where_prompts_part():
    """The second prompt that shares a beginning leaves a state where they part; the third goes on from there."""
    llm = tiny("qwen3_next")
    config = replace(CONFIG, prefill_chunk=256, state_checkpoints=2)
    engine, off = poisoned_engine(llm, config), poisoned_engine(llm, replace(config, prefix_reuse=False))
    text = prompt(100, 5)
    found = []
    for number in range(4):
        tokens = text + prompt(50, 500 + number)
        before = hits(engine)
        assert_same(alone(engine, tokens, DENSE), alone(off, tokens, DENSE), LIMITS["qwen3_next"])
        found.append(hits(engine) - before)
    assert found == [0, 0, 96, 96]
    none = poisoned_engine(llm, replace(config, state_checkpoints=0))
    for _ in range(2):
        assert_same(alone(none, tokens, DENSE), alone(off, tokens, DENSE), LIMITS["qwen3_next"])
    assert hits(none) == 0


def test_off_is_a_switch():
    engine = poisoned_engine(tiny("llama"), OFF)
    for _ in range(2):
        alone(engine, prompt(100), DENSE)
        assert engine.stats().pages_cached == 0 and engine.scheduler.pages.free_pages == CONFIG.pool_pages
    assert engine.stats().prefix_queried_tokens == 0
    with pytest.raises(up.ConfigError, match="prefix_reuse"):
        up.EngineConfig(prefix_reuse=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(up.ConfigError, match="state_checkpoints"):
        up.EngineConfig(state_checkpoints=-1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("mode", ["discard", "carry"])
def test_long_prompts_with_serving_sizes(family, mode):
    """Chunks of 256, 1,000 and 2,048 tokens; beginnings shared up to page and chunk boundaries."""
    llm = up.LLM.from_config(SIZES | MODELS[family] | {"max_position_embeddings": 4096}, dtype="float32", seed=2)
    dropping = up.UniPrefillConfig(top_p=0.8, drop_layers=DROPPING.drop_layers, dropped_tokens=mode)
    text = prompt(2600, 7)
    for chunk in (256, 1000, 2048):
        serving = up.EngineConfig(page_size=64, pool_pages=1500, max_running=2, prefill_chunk=chunk, max_length=3200)
        engine, off = poisoned_engine(llm, serving), poisoned_engine(llm, replace(serving, prefix_reuse=False))
        alone(engine, text, dropping), alone(engine, text, DENSE)
        for number, shared in enumerate((63, 64, 255, 1000, 1024, 2048, 2100)):
            own = text[:shared] + prompt(300, 600 + number)
            for config in (dropping, DENSE):
                before = hits(engine)
                assert_same(alone(engine, own, config), alone(off, own, config), LIMITS[family])
                if family != "qwen3_next":
                    assert hits(engine) - before >= shared - 8
        assert_nothing_held(engine)
