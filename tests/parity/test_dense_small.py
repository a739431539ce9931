"""Dense prefill and decode of small random models against transformers, float32."""

import numpy as np
import pytest

import uniprefill_jax as up
from tests.oracle.small_models import SMALL_MODELS, small_prompts
from tests.parity.compare import LOGIT_TOLERANCE, assert_same_greedy, divergence, greedy, relative_error
from tests.sparsify.rule import Rule

NAMES = list(SMALL_MODELS)
# Below, at and beyond windows, chunks and the RoPE knee; with the whole prompts they fill sixteen requests.
PREFIXES = (1, 2, 3, 4, 5, 47, 49, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_equals_transformers(name: str, small_llm, oracle_small) -> None:
    """Logits of whole prompts (0, 1 and 63 mod 64 tokens) and of many prefixes; greedy tokens of the whole prompts."""
    prompts, truth = small_prompts(name), oracle_small(name)
    batch = [prompt.tolist() for prompt in prompts] + [prompts[0][:length].tolist() for length in PREFIXES]
    completions = small_llm(name).generate(batch, up.UniPrefillConfig.dense(), greedy())
    last = [truth[f"logits_{number}"][-1] for number in range(len(prompts))]
    last += [truth["logits_0"][length - 1] for length in PREFIXES]
    errors = {
        len(prompt): relative_error(completion.prefill.logits, logits)
        for prompt, completion, logits in zip(batch, completions, last, strict=True)
    }
    print(f"{name}: largest relative logit error {max(errors.values()):.1e}")
    assert max(errors.values()) <= LOGIT_TOLERANCE, errors
    for number in range(len(prompts)):
        noise = LOGIT_TOLERANCE * float(last[number].std())
        tokens, margins = truth[f"tokens_{number}"], truth[f"margins_{number}"]
        assert_same_greedy(completions[number].token_ids, tokens, margins, noise)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_model_equals_transformers_at_every_position(name: str, plain_model, oracle_small) -> None:
    """What the other tests lean on. An expert may change sides in float32: one position in a hundred may be off."""
    prompt, truth = small_prompts(name)[0], oracle_small(name)
    logits = plain_model(name).forward(prompt, 1, Rule()).logits
    errors = np.array([relative_error(ours, theirs) for ours, theirs in zip(logits, truth["logits_0"], strict=True)])
    assert np.median(errors) <= 1e-5
    assert np.quantile(errors, 0.99) <= LOGIT_TOLERANCE
    assert errors[-1] <= LOGIT_TOLERANCE


def test_bfloat16_stays_close(small_llm, oracle_small) -> None:
    """KL to float32 of the family that has no packaged pretrained weights."""
    name = "qwen3-irregular"
    prompt, truth = small_prompts(name)[0], oracle_small(name)["logits_0"][-1]
    result = small_llm(name, "bfloat16").prefill([prompt.tolist()], up.UniPrefillConfig.dense())[0]
    assert np.asarray(result.logits).dtype == np.float32
    found = divergence(truth, result.logits)
    print(f"{name}: KL(float32 || bfloat16) {found:.1e}")
    assert found <= 1e-2
