"""p = 1 is dense, bit for bit; a p that keeps everything differs by float noise only."""

import numpy as np
import pytest

import uniprefill_jax as up
from tests.oracle.small_models import small_prompts
from tests.parity.compare import greedy, relative_error
from tests.parity.test_modes import DROPS, MODES, SETTINGS, SIZES


@pytest.mark.parametrize(("name", "mode"), [("llama-scaled", "discard"), ("gemma-regular", "carry")])
def test_p_of_one_is_bit_identical_to_dense(name: str, mode: str, small_llm) -> None:
    prompts = [small_prompts(name)[1].tolist()]
    whole = up.UniPrefillConfig(top_p=1.0, drop_layers=DROPS[name], dropped_tokens=mode, **SIZES)
    ours = small_llm(name).generate(prompts, whole, greedy())
    dense = small_llm(name).generate(prompts, up.UniPrefillConfig.dense(), greedy())
    for one, other in zip(ours, dense, strict=True):
        assert np.asarray(one.prefill.logits).tobytes() == np.asarray(other.prefill.logits).tobytes()
        assert one.token_ids == other.token_ids
        assert np.asarray(one.prefill.kv_lengths).tolist() == np.asarray(other.prefill.kv_lengths).tolist()
        assert one.prefill.flop_fraction == 1.0


@pytest.mark.parametrize(
    ("name", "mode"), [("llama-scaled", 0), ("llama-scaled", 3), ("gemma-regular", 0), ("gemma-regular", 3)]
)
def test_a_p_that_keeps_everything_runs_the_drops_and_changes_nothing(name: str, mode: int, small_llm) -> None:
    """1 - 1e-9 is 1 in float32: the program with drops in it runs, and every drop keeps all.

    The prompt and settings are those of test_modes, whose compiled programs serve here too.
    """
    prompt = small_prompts(name)[1].tolist()
    settings = SIZES | dict(zip(SETTINGS, MODES[mode], strict=True))
    config = up.UniPrefillConfig(top_p=1 - 1e-9, drop_layers=DROPS[name], **settings)
    ours = small_llm(name).prefill([prompt], config)[0]
    dense = small_llm(name).prefill([prompt], up.UniPrefillConfig.dense())[0]
    assert sorted(ours.kept_positions) == list(DROPS[name])
    for kept in ours.kept_positions.values():
        np.testing.assert_array_equal(kept, np.arange(len(prompt)))
    assert relative_error(ours.logits, dense.logits) <= 1e-5
    # Scoring is counted, dropping saves nothing.
    assert 1.0 <= ours.flop_fraction <= 1.1
