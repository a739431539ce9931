"""UniPrefill end to end against the plain model: every mode, all families; and decoding over what was kept."""

import numpy as np
import pytest

from tests.oracle.small_models import SMALL_MODELS, make_prompt, small_prompts
from tests.parity.compare import assert_equals_plain, greedy, library_config
from tests.sparsify.rule import Rule

DROPS = {
    "llama-plain": (1, 2, 4),
    "llama-scaled": (1, 3),
    "gemma-regular": (5, 11),
    "gemma-irregular": (1, 4, 5),
    "qwen3-next": (3, 7),
    "qwen3-irregular": (0, 3, 5),
}
SIZES = {"block_size": 16, "sink_tokens": 32, "window_tokens": 24}
# Nearly every pair of choices of two settings occurs.
MODES = [
    ("discard", "position", "mean", 0.0, "all", "crossing"),
    ("discard", "kept", "peak", 0.5, "candidates", "below"),
    ("carry", "position", "peak", 0.0, "candidates", "crossing"),
    ("carry", "kept", "mean", 0.5, "all", "below"),
    ("carry", "position", "peak", 0.5, "all", "below"),
    ("discard", "kept", "mean", 0.0, "candidates", "crossing"),
]
SETTINGS = ("dropped_tokens", "sliding_window", "score", "score_memory", "top_p_over", "cut")
FULL = ("llama-scaled", "gemma-regular", "qwen3-next")
SOME = ("llama-plain", "gemma-irregular", "qwen3-irregular")
CASES = [(name, mode) for name in FULL for mode in range(len(MODES))] + [
    (name, mode) for name in SOME for mode in (1, 4)
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_kept_sets_logits_and_decoding_equal_the_plain_model(name: str, mode: int, small_llm, plain_model) -> None:
    prompt = small_prompts(name)[1]
    dropped = []
    for top_p in (0.6, 0.9):
        rule = Rule(top_p=top_p, drop_layers=DROPS[name], **SIZES, **dict(zip(SETTINGS, MODES[mode], strict=True)))
        completion = small_llm(name).generate([prompt.tolist()], library_config(rule), greedy())[0]
        trace = assert_equals_plain(completion, prompt, plain_model(name), rule)
        dropped.append([len(prompt) - len(kept) for kept in trace.kept.values()])
    assert all(drop > 0 for drop in dropped[0]), f"nothing was dropped: {dropped}"
    assert sum(dropped[0]) > sum(dropped[1])


@pytest.mark.parametrize("name", ["llama-plain", "gemma-irregular", "qwen3-irregular"])
def test_default_sizes(name: str, small_llm, plain_model) -> None:
    """Block 64, sink and window 128, on a longer prompt."""
    prompt = make_prompt(SMALL_MODELS[name].config["vocab_size"], 1217, 9)
    rule = Rule(top_p=0.9, drop_layers=DROPS[name])
    completion = small_llm(name).generate([prompt.tolist()], library_config(rule), greedy(20))[0]
    trace = assert_equals_plain(completion, prompt, plain_model(name), rule)
    assert all(len(kept) < len(prompt) for kept in trace.kept.values())


@pytest.mark.parametrize("mode", ["discard", "carry"])
def test_a_prompt_of_sink_and_window_alone_is_dense(mode: str, small_llm, plain_model) -> None:
    prompt = small_prompts("llama-scaled")[0][:56]
    rule = Rule(top_p=0.3, drop_layers=DROPS["llama-scaled"], dropped_tokens=mode, **SIZES)
    completion = small_llm("llama-scaled").generate([prompt.tolist()], library_config(rule), greedy())[0]
    trace = assert_equals_plain(completion, prompt, plain_model("llama-scaled"), rule)
    assert all(len(kept) == len(prompt) for kept in trace.kept.values())
    assert np.asarray(completion.prefill.kv_lengths).tolist() == [56] * 5
