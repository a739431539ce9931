"""Sampling, stopping and streaming, on a small random model and the packaged SmolLM2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import uniprefill_jax as up
from uniprefill_jax.sampling import SamplingKind, SamplingNumbers, sample

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
}


@pytest.fixture(scope="module")
def tiny():
    return up.LLM.from_config(TINY, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def smollm():
    return up.LLM.load("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def logits():
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, 50), dtype=np.float32))


draw_once = jax.jit(sample, static_argnames="kind")


def draw(logits, steps: int, **setting) -> np.ndarray:
    config = up.SamplingConfig(**setting)
    kind, numbers = SamplingKind.of(config), SamplingNumbers.of(config)
    return np.stack([np.asarray(draw_once(logits, kind, numbers, jnp.int32(step))) for step in range(steps)])


def test_greedy_takes_the_likeliest(logits):
    assert (draw(logits, 3) == np.asarray(logits.argmax(-1))).all()


def test_top_k_and_top_p_restrict(logits):
    order = np.argsort(-np.asarray(logits), axis=-1)
    drawn = draw(logits, 60, temperature=3.0, top_k=4)
    for request in range(2):
        assert set(drawn[:, request]) <= set(order[request, :4]) and len(set(drawn[:, request])) > 1
    probabilities = np.exp(np.asarray(logits[0], np.float64))
    probabilities /= probabilities.sum()
    needed = int(np.searchsorted(np.cumsum(probabilities[order[0]]), 0.3)) + 1
    assert set(draw(logits, 80, temperature=1.0, top_p=0.3)[:, 0]) <= set(order[0, :needed])
    assert (draw(logits, 5, temperature=1.0, top_p=1e-6) == order[:, 0]).all()


def test_draws_follow_the_distribution():
    two = jnp.log(jnp.asarray([[0.8, 0.2]]))
    share = draw(two, 400, temperature=1.0).mean()
    assert 0.14 < share < 0.26


def test_seeds_repeat_and_batches_do_not_matter(tiny):
    setting = {"max_tokens": 12, "temperature": 1.0}
    prompts = [[5, 6, 7], list(range(40))]
    both = tiny.generate(prompts, None, up.SamplingConfig(seed=3, **setting))
    again = tiny.generate(prompts[1:], None, up.SamplingConfig(seed=3, **setting))
    other = tiny.generate(prompts[1:], None, up.SamplingConfig(seed=4, **setting))
    assert both[1].token_ids == again[0].token_ids != other[0].token_ids
    assert all(completion.finish_reason == "length" for completion in both)


def test_generation_stops_at_the_models_length(tiny):
    completion = tiny.generate([[1] * 318], None, up.SamplingConfig(max_tokens=50))[0]
    # Positions 318 and 319 can be fed, so three tokens can be drawn.
    assert len(completion.token_ids) == 3 and completion.finish_reason == "length"


def test_a_long_neighbour_does_not_end_a_short_prompt(tiny):
    both = tiny.generate([[1] * 320, [1, 2, 3]], None, up.SamplingConfig(max_tokens=8))
    assert [len(completion.token_ids) for completion in both] == [1, 8]
    assert both[1].token_ids == tiny.generate([[1, 2, 3]], None, up.SamplingConfig(max_tokens=8))[0].token_ids


def test_longer_generations_agree_with_shorter(tiny):
    short = tiny.generate([[9, 8, 7]], None, up.SamplingConfig(max_tokens=5))[0]
    long = tiny.generate([[9, 8, 7]], None, up.SamplingConfig(max_tokens=60))[0]
    assert long.token_ids[:5] == short.token_ids


def test_stop_strings_need_a_tokenizer(tiny):
    with pytest.raises(up.InputError, match="tokenizer"):
        tiny.generate([[1]], None, up.SamplingConfig(stop=("x",)))
    with pytest.raises(up.InputError, match="tokenizer"):
        tiny.prefill(["text"])


def test_chat_answer_ends_with_the_end_token(smollm):
    ids = smollm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    completion = smollm.generate([ids], up.UniPrefillConfig.dense(), up.SamplingConfig(max_tokens=24))[0]
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason == "stop" and completion.token_ids[-1] in smollm.tokenizer.eos_token_ids
    going_on = smollm.generate([ids], up.UniPrefillConfig.dense(), up.SamplingConfig(max_tokens=24, ignore_eos=True))[0]
    assert len(going_on.token_ids) == 24 and going_on.finish_reason == "length"


def test_stop_strings_cut_the_text_and_streams_hold_them_back(smollm):
    ids = smollm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    stopping = up.SamplingConfig(max_tokens=24, stop=("France is", "zzz"))
    completion = smollm.generate([ids], up.UniPrefillConfig.dense(), stopping)[0]
    assert completion.text == "The capital of " and completion.finish_reason == "stop"
    pieces = list(smollm.stream(ids, up.UniPrefillConfig.dense(), stopping))
    assert "".join(text for _, text in pieces) == completion.text
    assert [token for token, _ in pieces] == completion.token_ids
    whole = smollm.stream(ids, up.UniPrefillConfig.dense(), up.SamplingConfig(max_tokens=24))
    assert "".join(text for _, text in whole) == "The capital of France is Paris."


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"seed": -1},
        {"stop": ("",)},
    ],
)
def test_wrong_sampling_settings(wrong):
    with pytest.raises(up.ConfigError, match=next(iter(wrong))):
        up.SamplingConfig(**wrong)
