"""UniPrefill end to end against the plain model: every mode, all families; and decoding over what was kept."""

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
# Every mode at least once, most on the family where windows matter: a program takes ten seconds or more to compile.
CASES = [("gemma-regular", mode) for mode in range(4)] + [
    ("llama-scaled", 0),
    ("llama-scaled", 3),
    ("llama-plain", 5),
    ("gemma-irregular", 4),
    ("qwen3-next", 1),
    ("qwen3-irregular", 3),
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


def test_default_sizes(small_llm, plain_model) -> None:
    """Block 64, sink and window 128, on a longer prompt."""
    name = "llama-plain"
    prompt = make_prompt(SMALL_MODELS[name].config["vocab_size"], 1217, 9)
    rule = Rule(top_p=0.9, drop_layers=DROPS[name])
    completion = small_llm(name).generate([prompt.tolist()], library_config(rule), greedy())[0]
    trace = assert_equals_plain(completion, prompt, plain_model(name), rule)
    assert all(len(kept) < len(prompt) for kept in trace.kept.values())
