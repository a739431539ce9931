"""p = 1 is dense, bit for bit; a p that keeps everything differs by float noise only."""

import numpy as np
import pytest

import uniprefill_jax as up
from tests.oracle.small_models import small_prompts
from tests.parity.compare import greedy, relative_error
from tests.parity.test_modes import DROPS, SIZES

NAMES = ("llama-scaled", "gemma-regular", "qwen3-next")


@pytest.mark.parametrize("mode", ["discard", "carry"])
@pytest.mark.parametrize("name", NAMES)
def test_p_of_one_is_bit_identical_to_dense(name: str, mode: str, small_llm) -> None:
    prompts = [prompt.tolist() for prompt in small_prompts(name)[:2]]
    whole = up.UniPrefillConfig(top_p=1.0, drop_layers=DROPS[name], dropped_tokens=mode, **SIZES)
    ours = small_llm(name).generate(prompts, whole, greedy(8))
    dense = small_llm(name).generate(prompts, up.UniPrefillConfig.dense(), greedy(8))
    for one, other in zip(ours, dense, strict=True):
        assert np.asarray(one.prefill.logits).tobytes() == np.asarray(other.prefill.logits).tobytes()
        assert one.token_ids == other.token_ids
        assert np.asarray(one.prefill.kv_lengths).tolist() == np.asarray(other.prefill.kv_lengths).tolist()
        assert one.prefill.flop_fraction == 1.0


@pytest.mark.parametrize("mode", ["discard", "carry"])
@pytest.mark.parametrize("name", NAMES)
def test_a_p_that_keeps_everything_runs_the_drops_and_changes_nothing(name: str, mode: str, small_llm) -> None:
    """1 - 1e-9 is 1 in float32: the program with drops in it runs, and every drop keeps all."""
    prompt = small_prompts(name)[1]
    config = up.UniPrefillConfig(top_p=1 - 1e-9, drop_layers=DROPS[name], dropped_tokens=mode, **SIZES)
    ours = small_llm(name).prefill([prompt.tolist()], config)[0]
    dense = small_llm(name).prefill([prompt.tolist()], up.UniPrefillConfig.dense())[0]
    assert sorted(ours.kept_positions) == list(DROPS[name])
    for kept in ours.kept_positions.values():
        np.testing.assert_array_equal(kept, np.arange(len(prompt)))
    assert relative_error(ours.logits, dense.logits) <= 1e-5
