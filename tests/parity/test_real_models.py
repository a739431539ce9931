"""The packaged pretrained models against transformers on real text, float32; bfloat16 against float32."""

import numpy as np
import pytest

import uniprefill_jax as up
from tests.conftest import REAL_LENGTHS
from tests.parity.compare import LOGIT_TOLERANCE, assert_same_greedy, divergence, greedy, relative_error

NAMES = list(REAL_LENGTHS)


@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_equals_transformers(name: str, real_llm, oracle_real) -> None:
    truth, lengths = oracle_real(name), REAL_LENGTHS[name]
    prompts = [truth["ids"][:length].tolist() for length in lengths]
    completions = real_llm(name).generate(prompts, up.UniPrefillConfig.dense(), greedy())
    for length, completion in zip(lengths, completions, strict=True):
        error = relative_error(completion.prefill.logits, truth[f"logits_{length}"])
        print(f"{name} at {length} tokens: relative logit error {error:.1e}")
        assert error <= LOGIT_TOLERANCE
        noise = LOGIT_TOLERANCE * float(truth[f"logits_{length}"].std())
        assert_same_greedy(completion.token_ids, truth[f"tokens_{length}"], truth[f"margins_{length}"], noise)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_diverges_little(name: str, real_llm, oracle_real) -> None:
    truth = oracle_real(name)
    length = REAL_LENGTHS[name][0]
    result = real_llm(name, "bfloat16").prefill([truth["ids"][:length].tolist()], up.UniPrefillConfig.dense())[0]
    found = divergence(truth[f"logits_{length}"], result.logits)
    print(f"{name} at {length} tokens: KL(float32 || bfloat16) {found:.1e}")
    assert found <= 1e-2


@pytest.mark.slow
def test_a_ragged_batch_of_the_real_model_equals_each_prompt_alone(real_llm, oracle_real) -> None:
    llm, ids = real_llm("smollm2-135m"), oracle_real("smollm2-135m")["ids"]
    ids = np.concatenate([ids, ids[::-1]])
    config = up.UniPrefillConfig(top_p=0.97)
    prompts = [ids[:length].tolist() for length in (1, 127, 128, 256, 257, 700, 2048, 3001)]
    for prompt, result in zip(prompts, llm.prefill(prompts, config), strict=True):
        alone = llm.prefill([prompt], config)[0]
        for layer, kept in alone.kept_positions.items():
            np.testing.assert_array_equal(kept, result.kept_positions[layer])
        assert relative_error(result.logits, alone.logits) <= 1e-5
