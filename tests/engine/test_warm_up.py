"""Warming up: afterwards nothing is left to compile, and the length from which dropping pays is remembered."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import uniprefill_jax as up
from tests.engine.tiny import CONFIG, DROPPING, MODELS, SIZES, assert_nothing_held, prompt, run, tiny
from uniprefill_jax.engine import break_even
from uniprefill_jax.engine.break_even import BreakEven, Timing, measure_break_even, store_break_even, stored_break_even
from uniprefill_jax.engine.warm_up import warm_up

DENSE = up.UniPrefillConfig.dense()


@pytest.fixture
def compilations():
    """Programs compiled since the fixture was made."""
    seen = []

    def note(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.slow
def test_nothing_is_compiled_after_a_warm_up(compilations):
    """Two sizes of chunks, three of buffers, over a model of its own: nothing is compiled before."""
    llm = up.LLM.from_config(SIZES | MODELS["llama"], dtype="float32", seed=3)
    engine, config = up.Engine(llm, replace(CONFIG, prefill_chunk=256)), DROPPING
    steps = []
    warm_up(engine, config, progress=lambda done, total: steps.append((done, total)))
    assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] == len(steps) - 1
    assert engine.scheduler.budget == 256
    assert_nothing_held(engine)
    assert compilations
    compilations.clear()
    random = np.random.default_rng(1)
    for number, length in enumerate((1, 63, 64, 65, 128, 129, 200, 250, 30, 90, 17, 140)):
        sampling = up.SamplingConfig(
            max_tokens=5, temperature=float(number % 3), top_k=number % 5, seed=int(random.integers(100))
        )
        own = (config, replace(config, top_p=0.2), DENSE)[number % 3]
        engine.submit(prompt(length, number), own, sampling, logprobs=(None, 4)[number % 2])
    run(engine)
    assert not compilations


@pytest.fixture
def cache_folder(tmp_path):
    """Where compiled programs are kept during a test."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    yield tmp_path / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)


def test_break_even_is_measured_and_remembered(cache_folder, monkeypatch):
    engine, config = up.Engine(tiny("llama"), CONFIG), DROPPING
    assert stored_break_even(engine, config) is None
    monkeypatch.setattr(break_even, "SHORTEST", 64)
    found = measure_break_even(engine, config, 128)
    assert [timing.tokens for timing in found.timings] == [64, 128]
    assert all(timing.dense_seconds > 0 and timing.dropping_seconds > 0 for timing in found.timings)
    path = store_break_even(engine, config, found)
    assert path.parent == cache_folder
    assert stored_break_even(engine, config) == found
    assert stored_break_even(engine, replace(config, top_p=0.5)) is None
    path.write_text("{")
    assert stored_break_even(engine, config) is None


@pytest.mark.parametrize(
    ("wins", "below"), [((0, 0, 0), 1025), ((0, 0, 1), 1024), ((1, 0, 1), 1024), ((0, 1, 1), 512), ((1, 1, 1), 256)]
)
def test_dropping_has_to_win_at_every_longer_prompt(wins, below):
    timings = [Timing(256 << number, 1.0, 1.0 - 0.1 * won) for number, won in enumerate(wins)]
    assert BreakEven.of(timings).dense_below == below
