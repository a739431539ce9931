"""Dense prefill and decode of small random models against transformers, float32."""

import numpy as np
import pytest

import uniprefill_jax as up
from tests.oracle.small_models import SMALL_MODELS, small_prompts
from tests.parity.compare import LOGIT_TOLERANCE, assert_same_greedy, divergence, greedy, relative_error
from tests.sparsify.rule import Rule

NAMES = list(SMALL_MODELS)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, small_llm, oracle_small) -> None:
    prompts, truth = small_prompts(name), oracle_small(name)
    completions = small_llm(name).generate(
        [prompt.tolist() for prompt in prompts], up.UniPrefillConfig.dense(), greedy()
    )
    for number, completion in enumerate(completions):
        last = truth[f"logits_{number}"][-1]
        assert relative_error(completion.prefill.logits, last) <= LOGIT_TOLERANCE
        noise = LOGIT_TOLERANCE * float(last.std())
        assert_same_greedy(completion.token_ids, truth[f"tokens_{number}"], truth[f"margins_{number}"], noise)


@pytest.mark.parametrize("name", NAMES)
def test_every_prefix_length_equals_transformers(name: str, small_llm, oracle_small) -> None:
    """Many prefixes of one prompt in one ragged batch: below, at and beyond windows, chunks and the RoPE knee."""
    prompt, truth = small_prompts(name)[0], oracle_small(name)["logits_0"]
    lengths = [1, 2, 3, 4, 5, 15, 47, 48, 49, 63, 64, 65, 66, 127, 128, 129]
    results = small_llm(name).prefill([prompt[:length].tolist() for length in lengths], up.UniPrefillConfig.dense())
    errors = [relative_error(result.logits, truth[n - 1]) for result, n in zip(results, lengths, strict=True)]
    assert max(errors) <= LOGIT_TOLERANCE, dict(zip(lengths, errors, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_model_equals_transformers_at_every_position(name: str, plain_model, oracle_small) -> None:
    """What the other tests lean on. An expert may change sides in float32: one position in a hundred may be off."""
    prompt, truth = small_prompts(name)[0], oracle_small(name)
    logits = plain_model(name).forward(prompt, 1, Rule()).logits
    errors = np.array([relative_error(ours, theirs) for ours, theirs in zip(logits, truth["logits_0"], strict=True)])
    assert np.median(errors) <= 1e-5
    assert np.quantile(errors, 0.99) <= LOGIT_TOLERANCE
    assert errors[-1] <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_close(name: str, small_llm, oracle_small) -> None:
    """KL to float32. Random weights this sharp amplify rounding; the packaged models are held to 1e-2."""
    prompt, truth = small_prompts(name)[0], oracle_small(name)["logits_0"][-1]
    result = small_llm(name, "bfloat16").prefill([prompt.tolist()], up.UniPrefillConfig.dense())[0]
    assert np.asarray(result.logits).dtype == np.float32
    assert divergence(truth, result.logits) <= 0.1
