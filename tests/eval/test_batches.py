"""Which cases of a run share a batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.engine.tiny import tiny
from uniprefill_jax.eval.cases import Case
from uniprefill_jax.eval.runner import batch_shapes, run_cases
from uniprefill_jax.eval.settings import parse_settings
from uniprefill_jax.eval.store import AnswerStore


class Recorder:
    """Answers at once and notes the lengths of the prompts of every batch."""

    config = tiny("llama").config

    def __init__(self):
        self.batches: list[list[int]] = []

    def generate(self, prompts, config, sampling, *, continuations, shape) -> list[SimpleNamespace]:
        self.batches.append([len(prompt) for prompt in prompts])
        prefill = SimpleNamespace(segment_lengths=(1,), flop_fraction=1.0, seconds=1.0, compile_seconds=0.0)
        text = SimpleNamespace(text="", prefill=prefill, decode_seconds=0.0, decode_compile_seconds=0.0)
        return [text for _ in prompts]


def test_prompts_with_other_blocks_are_not_in_the_batch_whose_time_they_share():
    lengths = (120, 140, 128, 129)
    cases = [Case("one", 128, index, (0,) * length, ("x",), "all", 4) for index, length in enumerate(lengths)]
    settings = parse_settings(["block_size=16,most_blocks=8"])
    model: Any = Recorder()
    store = AnswerStore(None, {}, settings)
    run_cases(model, cases, settings, store, batch_shapes(model, cases, 4), lambda progress: None)
    assert model.batches == [[120, 140, 128, 129], [120, 128], [140, 129]]
    assert np.allclose([answer.prefill_ms for answer in store.answers.values()], [250.0] * 4 + [500.0] * 4)
