"""Blocks that grow with the prompt: the size is each request's own, whatever shares its batch."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import uniprefill_jax as up
from tests.engine.tiny import CONFIG, DROP_LAYERS, DROPPING, prompt, tiny
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.sparsify.methods.protocol import Method
from uniprefill_jax.sparsify.selection import select_tokens

GROWING = replace(DROPPING, sink_tokens=32, most_blocks=8)
PROMPTS = [prompt(100), prompt(200, 1), prompt(128, 2)]
SIZES = (16, 32, 16)


@pytest.mark.parametrize(("length", "size"), [(1, 16), (128, 16), (129, 32), (256, 32), (5000, 32)])
def test_size_doubles_with_the_length_as_far_as_the_sink_lets_it(length: int, size: int):
    settled = GROWING.for_length(length)
    assert (settled.block_size, settled.most_blocks) == (size, 0)
    assert settled.for_length(10 * length) == settled


def test_without_a_sink_the_largest_size_is_the_last():
    free = up.UniPrefillConfig(block_size=64, sink_tokens=0, most_blocks=4)
    assert [free.for_length(length).block_size for length in (256, 257, 513, 10**6)] == [64, 128, 256, 256]


def test_no_limit_is_the_setting_itself():
    config = up.UniPrefillConfig()
    assert config.for_length(10**6) is config


@pytest.mark.parametrize("value", [-1, 2.0, True])
def test_impossible_limits(value):
    with pytest.raises(up.ConfigError, match="most_blocks is"):
        up.UniPrefillConfig(most_blocks=value)


@pytest.fixture(scope="module")
def alone() -> list[up.PrefillResult]:
    """Each prompt by itself, with the size that is its own."""
    return [
        tiny("llama").prefill([tokens], replace(GROWING, block_size=size, most_blocks=0))[0]
        for tokens, size in zip(PROMPTS, SIZES, strict=True)
    ]


def test_prompts_of_a_batch_have_their_own_sizes(alone: list[up.PrefillResult]):
    together = tiny("llama").prefill(PROMPTS, GROWING)
    method = tiny("llama").prefill(PROMPTS, Method.of(GROWING))
    for number, (single, *others) in enumerate(zip(alone, together, method, strict=True)):
        for other in others:
            for layer in DROP_LAYERS:
                np.testing.assert_array_equal(other.kept_positions[layer], single.kept_positions[layer])
                assert len(other.block_mass[layer]) == len(single.block_mass[layer]), number
            np.testing.assert_allclose(other.logits, single.logits, rtol=1e-4, atol=1e-5)
    # The sizes decide something: the long prompt keeps other tokens in blocks of the short ones.
    small = tiny("llama").prefill([PROMPTS[1]], replace(GROWING, most_blocks=0))[0]
    assert small.segment_lengths != alone[1].segment_lengths


def test_generation_keeps_the_order_of_prompts():
    continuations = [[number] for number in range(len(PROMPTS))]
    sampling = up.SamplingConfig(max_tokens=3)
    together = tiny("llama").generate(PROMPTS, GROWING, sampling, continuations=continuations)
    for tokens, given, completion, size in zip(PROMPTS, continuations, together, SIZES, strict=True):
        own = replace(GROWING, block_size=size, most_blocks=0)
        (single,) = tiny("llama").generate([tokens], own, sampling, continuations=[given])
        assert completion.token_ids == single.token_ids
        np.testing.assert_allclose(completion.continuation_logprobs, single.continuation_logprobs, rtol=1e-4)


def test_engine_settles_the_size_by_the_prompt(alone: list[up.PrefillResult]):
    engine = up.Engine(tiny("llama"), CONFIG)
    numbers = [engine.submit(tokens, GROWING, up.SamplingConfig(max_tokens=1), report=True) for tokens in PROMPTS]
    while engine.has_work:
        engine.step()
    for number, single in zip(numbers, alone, strict=True):
        report = engine.take_report(number)
        for layer in DROP_LAYERS:
            np.testing.assert_array_equal(report.kept_positions[layer], single.kept_positions[layer])


def test_lengths_of_different_sizes_share_no_program():
    model = tiny("llama").config
    plan = PrefillPlan.for_batch(model, GROWING, DROP_LAYERS, [200, 130], jnp.dtype(jnp.float32))
    assert (plan.config.block_size, plan.config.most_blocks) == (32, 0)
    with pytest.raises(up.ConfigError, match=r"100 to 200 tokens have blocks of \[16, 32\]"):
        PrefillPlan.for_batch(model, GROWING, DROP_LAYERS, [200, 100], jnp.dtype(jnp.float32))


def test_selection_by_itself_wants_a_settled_size():
    with pytest.raises(up.InputError, match="for_length"):
        select_tokens(np.ones(4), 64, GROWING)
