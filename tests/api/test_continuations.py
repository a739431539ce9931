"""Tokens fed after a prompt, and batches that share programs, on a small random model."""

import jax
import numpy as np
import pytest

import uniprefill_jax as up
from tests.api.test_generation import TINY
from uniprefill_jax.config import BatchShape

DENSE = up.UniPrefillConfig.dense()
DROPPING = up.UniPrefillConfig(
    top_p=0.3, block_size=16, sink_tokens=16, window_tokens=16, drop_layers=(0,), sliding_window="position"
)
PROMPTS = [list(np.random.default_rng(seed).integers(0, 96, size)) for seed, size in ((0, 190), (1, 131))]
TOKENS = [[5, 9, 2, 77, 31], [40, 41]]
GREEDY = up.SamplingConfig(max_tokens=6)


@pytest.fixture(scope="module")
def tiny():
    return up.LLM.from_config(TINY, dtype="float32", seed=1)


def test_fed_tokens_are_scored_as_part_of_the_prompt_and_then_continued(tiny):
    fed = tiny.generate(PROMPTS, DENSE, GREEDY, continuations=TOKENS)
    for prompt, tokens, completion in zip(PROMPTS, TOKENS, fed, strict=True):
        for number, token in enumerate(tokens):
            logits = tiny.prefill([prompt + tokens[:number]], DENSE)[0].logits
            expected = jax.nn.log_softmax(logits)[token]
            assert completion.continuation_logprobs[number] == pytest.approx(float(expected), abs=2e-4)
        whole = tiny.generate([prompt + tokens], DENSE, GREEDY)[0]
        assert completion.token_ids == whole.token_ids and len(whole.token_ids) == 6


def test_after_a_drop_fed_tokens_see_what_was_kept(tiny):
    """Feeding what would have been drawn anyway gives the rest of it: the cache is that of the prompt alone."""
    drawn = tiny.generate(PROMPTS, DROPPING, up.SamplingConfig(max_tokens=9))
    assert all(
        completion.prefill.kv_lengths[-1] < len(prompt) for prompt, completion in zip(PROMPTS, drawn, strict=True)
    )
    fed = tiny.generate(PROMPTS, DROPPING, GREEDY, continuations=[drawn[0].token_ids[:3], []])
    assert fed[0].token_ids == drawn[0].token_ids[3:]
    assert fed[1].token_ids == drawn[1].token_ids[:6] and len(fed[1].continuation_logprobs) == 0
    dense = tiny.generate(PROMPTS, DENSE, GREEDY, continuations=TOKENS)
    dropped = tiny.generate(PROMPTS, DROPPING, GREEDY, continuations=TOKENS)
    assert np.abs(dense[0].continuation_logprobs - dropped[0].continuation_logprobs).max() > 1e-3


def test_batches_of_one_shape_share_programs_and_agree_with_their_own(tiny):
    shape = BatchShape(requests=3, length=200, new_tokens=20)
    first = tiny.generate(PROMPTS, DROPPING, GREEDY, shape=shape)
    compiled = len(tiny.programs.compiled)
    others = tiny.generate([PROMPTS[1][:120]], DROPPING, up.SamplingConfig(max_tokens=12), shape=shape)
    assert len(tiny.programs.compiled) == compiled and others[0].decode_compile_seconds == 0
    for plain, shaped in zip(tiny.generate(PROMPTS, DROPPING, GREEDY), first, strict=True):
        assert plain.token_ids == shaped.token_ids
        for layer, kept in plain.prefill.kept_positions.items():
            np.testing.assert_array_equal(kept, shaped.prefill.kept_positions[layer])


def test_what_does_not_fit(tiny):
    with pytest.raises(up.InputError, match="do not fit into a batch of 1 of 200"):
        tiny.prefill(PROMPTS, DENSE, shape=BatchShape(1, 200))
    with pytest.raises(up.InputError, match="1 continuations for 2 prompts"):
        tiny.generate(PROMPTS, DENSE, continuations=[[1]])
    with pytest.raises(up.InputError, match="takes at most 320"):
        tiny.generate(PROMPTS, DENSE, continuations=[[1] * 200, []])
    with pytest.raises(up.ConfigError, match="length is 0"):
        BatchShape(1, 0)
