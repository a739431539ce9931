"""The length ladder that accelerators use gives what the CPU's single rung gives."""

from dataclasses import replace

import numpy as np

import uniprefill_jax as up
from tests.oracle.small_models import small_prompts
from tests.parity.compare import assert_equals_plain, greedy, library_config
from tests.parity.test_modes import DROPS, MODES, SETTINGS, SIZES
from tests.sparsify.rule import Rule
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.sparsify.buckets import length_ladder


def test_the_ladder_equals_the_plain_model(small_folder, plain_model, monkeypatch) -> None:
    name, mode = "llama-scaled", 0
    for_batch = PrefillPlan.for_batch

    def on_accelerator(*arguments, **named):
        plan = for_batch(*arguments, **named)
        return replace(plan, ladder=length_ladder(plan.num_rows), row_chunk=None)

    monkeypatch.setattr(PrefillPlan, "for_batch", on_accelerator)
    llm = up.LLM.load(small_folder(name), dtype="float32")
    prompt = small_prompts(name)[1][:321]
    ladder = np.array(length_ladder(384))
    rungs = set()
    for top_p in (0.1, 0.4, 0.7, 0.95):
        rule = Rule(top_p=top_p, drop_layers=DROPS[name], **SIZES, **dict(zip(SETTINGS, MODES[mode], strict=True)))
        completion = llm.generate([prompt.tolist()], library_config(rule), greedy())[0]
        assert_equals_plain(completion, prompt, plain_model(name), rule)
        lengths = [len(kept) for kept in completion.prefill.kept_positions.values()]
        rungs |= {int(ladder[np.searchsorted(ladder, length)]) for length in lengths}
    assert len(rungs) >= 3, f"few rungs were taken: {sorted(rungs)}"
