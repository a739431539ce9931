"""Prefill in chunks, segment by segment, equals prefill at once; so does decoding over pages."""

from dataclasses import replace

import numpy as np
import pytest

import uniprefill_jax as up
from tests.engine.tiny import CONFIG, DROP_LAYERS, DROPPING, MODELS, SIZES, poisoned_engine, prompt, run, tiny
from tests.parity.compare import relative_error

PROMPTS = [prompt(length, seed) for seed, length in enumerate((190, 129, 160))]
GREEDY = up.SamplingConfig(max_tokens=20, ignore_eos=True)
# This small recurrent model amplifies float32 rounding: where a prompt lies in a packed batch moves its logits by 4e-5.
LIMITS = {"llama": 1e-5, "gemma3": 1e-5, "qwen3_next": 5e-5}


def assert_equals_whole(llm: up.LLM, family: str, config: up.UniPrefillConfig, chunks: tuple[int, ...]) -> None:
    """Kept sets, logits and greedy tokens of three prompts, for several chunk sizes, in poisoned pools."""
    expected = llm.generate(PROMPTS, config, GREEDY)
    assert len(expected[0].prefill.kept_positions[DROP_LAYERS[-1]]) < 190, "nothing was dropped"
    for chunk in chunks:
        engine = poisoned_engine(llm, replace(CONFIG, prefill_chunk=chunk))
        ids = [engine.submit(tokens, config, GREEDY, report=True) for tokens in PROMPTS]
        tokens = run(engine)
        for number, completion in zip(ids, expected, strict=True):
            report = engine.take_report(number)
            assert sorted(report.kept_positions) == sorted(completion.prefill.kept_positions)
            for layer, kept in completion.prefill.kept_positions.items():
                np.testing.assert_array_equal(report.kept_positions[layer], kept)
                np.testing.assert_allclose(report.cut_margin[layer], completion.prefill.cut_margin[layer], atol=1e-5)
            error = relative_error(report.logits, completion.prefill.logits)
            print(f"{family}, chunks of {chunk}: relative logit error {error:.1e}")
            assert error <= LIMITS[family]
            assert tokens[number] == completion.token_ids


@pytest.mark.parametrize(
    ("family", "mode", "window"),
    [
        # Llama in discard mode: test_engine.py.
        ("gemma3", "discard", "position"),
        pytest.param("llama", "carry", "position", marks=pytest.mark.slow),
        pytest.param("gemma3", "carry", "kept", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "discard", "position", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "carry", "position", marks=pytest.mark.slow),
    ],
)
def test_chunks_equal_the_whole(family, mode, window):
    config = replace(DROPPING, dropped_tokens=mode, sliding_window=window)
    assert_equals_whole(tiny(family), family, config, chunks=(64, 37))


@pytest.mark.slow
@pytest.mark.parametrize("score_memory", [0.0, 0.5])
def test_peak_scores_with_memory(score_memory):
    config = replace(DROPPING, score="peak", score_memory=score_memory, top_p_over="candidates", dropped_tokens="carry")
    assert_equals_whole(tiny("llama"), "llama", config, chunks=(50,))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_long_prompts_in_chunks_of_serving_sizes(family):
    shape = SIZES | MODELS[family] | {"max_position_embeddings": 4096}
    llm = up.LLM.from_config(shape, dtype="float32", seed=2)
    config = up.UniPrefillConfig(top_p=0.8, drop_layers=DROP_LAYERS)
    tokens = prompt(3001, 7)
    expected = llm.prefill([tokens], config)[0]
    assert len(expected.kept_positions[DROP_LAYERS[-1]]) < 3001
    for chunk in (256, 1000, 2048):
        serving = up.EngineConfig(page_size=64, pool_pages=400, max_running=2, prefill_chunk=chunk, max_length=3200)
        engine = poisoned_engine(llm, serving)
        number = engine.submit(tokens, config, up.SamplingConfig(max_tokens=1), report=True)
        run(engine)
        report = engine.take_report(number)
        for layer, kept in expected.kept_positions.items():
            np.testing.assert_array_equal(report.kept_positions[layer], kept)
        error = relative_error(report.logits, expected.logits)
        print(f"{family}, chunks of {chunk}: relative logit error {error:.1e}")
        assert error <= LIMITS[family]
