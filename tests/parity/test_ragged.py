"""A ragged batch gives every prompt what it gets alone, whatever the order and whatever shares the batch."""

import numpy as np
import pytest

import uniprefill_jax as up
from tests.oracle.small_models import SMALL_MODELS, make_prompt
from tests.parity.compare import greedy, relative_error
from uniprefill_jax import decode

LENGTHS = (1, 127, 128, 256, 257, 700, 2048, 3001)
SETTINGS = {
    "llama-scaled": dict(drop_layers=(1, 3), top_p=0.9),
    "gemma-irregular": dict(drop_layers=(1, 4, 5), top_p=0.8, dropped_tokens="carry"),
    "qwen3-irregular": dict(drop_layers=(0, 3, 5), top_p=0.8, score="peak", score_memory=0.5, top_p_over="candidates"),
}


def prompts_of(name: str) -> list[list[int]]:
    return [make_prompt(SMALL_MODELS[name].config["vocab_size"], length, 77).tolist() for length in LENGTHS]


def assert_same(ours: up.PrefillResult, other: up.PrefillResult) -> None:
    assert sorted(ours.kept_positions) == sorted(other.kept_positions)
    for layer, kept in ours.kept_positions.items():
        np.testing.assert_array_equal(kept, other.kept_positions[layer])
        np.testing.assert_allclose(ours.block_mass[layer], other.block_mass[layer], atol=1e-6)
    assert np.asarray(ours.kv_lengths).tolist() == np.asarray(other.kv_lengths).tolist()
    assert relative_error(ours.logits, other.logits) <= 1e-5


# Which prompts also run alone: all where programs compile quickly, one that drops tokens elsewhere.
ALONE = {"llama-scaled": range(8), "gemma-irregular": (6,), "qwen3-irregular": (5,)}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_ragged_batch_equals_each_prompt_alone(name: str, small_llm) -> None:
    llm, config = small_llm(name), up.UniPrefillConfig(**SETTINGS[name])
    prompts = prompts_of(name)
    together = llm.prefill(prompts, config)
    assert all(len(kept) < 3001 for kept in together[-1].kept_positions.values())
    # Requests no longer than sink and window keep everything.
    for result, length in zip(together[:4], LENGTHS, strict=False):
        assert all(len(kept) == length for kept in result.kept_positions.values())
    for number in ALONE[name]:
        assert_same(together[number], llm.prefill([prompts[number]], config)[0])

    order = [5, 0, 7, 3, 6, 1, 4, 2]
    shuffled = llm.prefill([prompts[number] for number in order], config)
    for number, result in zip(order, shuffled, strict=True):
        assert_same(result, together[number])


def test_decoding_a_ragged_batch_equals_each_prompt_alone(small_llm) -> None:
    llm, config = small_llm("llama-scaled"), up.UniPrefillConfig(**SETTINGS["llama-scaled"])
    prompts = [prompt for prompt in prompts_of("llama-scaled") if len(prompt) <= 700]
    together = llm.generate(prompts, config, greedy())
    for number in (2, 5):
        alone = llm.generate([prompts[number]], config, greedy())[0]
        assert alone.token_ids == together[number].token_ids


@pytest.mark.parametrize(
    "name",
    ["llama-scaled", *(pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS if name != "llama-scaled")],
)
def test_decoding_with_every_requests_rows_apart_changes_nothing(name: str, small_llm, monkeypatch) -> None:
    """A batch with far more rows than its longest prompt, with each request's rows taken out and with all rows."""
    llm = small_llm(name)
    config = up.UniPrefillConfig(**SETTINGS[name] | dict(sink_tokens=64, window_tokens=32, top_p=0.4))
    vocabulary = SMALL_MODELS[name].config["vocab_size"]
    prompts = [make_prompt(vocabulary, length, 5).tolist() for length in (1, 300, 257, 319, 320, 256)]
    continuations = [make_prompt(vocabulary, 9, number).tolist() for number in range(6)]
    plans, real = [], decode.DecodePlan.after

    def after(*arguments, **options) -> decode.DecodePlan:
        plans.append(real(*arguments, **options))
        return plans[-1]

    monkeypatch.setattr(decode.DecodePlan, "after", after)
    apart = llm.generate(prompts, config, greedy(), continuations=continuations)
    monkeypatch.setattr(decode, "COST_OF_TAKING", 100)
    whole = llm.generate(prompts, config, greedy(), continuations=continuations)
    assert plans[0].rows_apart == 320 and plans[1].rows_apart is None
    assert any(len(kept) < 300 for kept in apart[1].prefill.kept_positions.values())
    for ours, theirs in zip(apart, whole, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.continuation_logprobs, theirs.continuation_logprobs, rtol=1e-5)
