"""The judge of unequal logits: a near tie of a router explains a difference, and nothing else than rounding does."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import uniprefill_jax as up
from tests.parallel.comparison import prompts_of
from tests.parallel.models import CONFIGS, SETTINGS, write_checkpoint
from tests.parallel.rounding import Explanation, RoundingModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RoundingModel:
    """A model in whose last layer two experts score almost alike, always."""
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "qwen", "qwen")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("layers.1.mlp.gate.weight"):
                tensor[3] = tensor[5] * (1 + 1e-6)
        save_file(tensors, file)
    assert json.loads((folder / "config.json").read_text()) == CONFIGS["qwen"]
    return RoundingModel(folder)


def judged(model: RoundingModel, change: float) -> Explanation:
    """One run as float64 has it, and one after the other choice in a near tie of the last row, times 1 + change."""
    config = up.UniPrefillConfig(**SETTINGS["qwen"])
    for seed in range(20):
        (prompt,) = prompts_of((30,), seed)
        kept = {0: np.arange(30)}
        logits = model.logits(prompt, config, kept)
        why = model.explain(prompt, config, kept, (logits, logits))
        assert why.holds and why.errors == (0, 0)
        ties = [tie for tie in why.near_ties if (tie.layer, tie.row) == (1, 29)]
        if ties:
            other = model.logits(prompt, config, kept, reverse=ties)
            return model.explain(prompt, config, kept, (logits, other * (1 + change)))
    raise AssertionError("no prompt ends in a near tie")


def test_a_near_tie_explains_what_follows_from_it(model):
    why = judged(model, 0)
    assert why.holds and why.spread < 1e-3
    ours, theirs = why.reversed
    assert not ours and [(tie.layer, tie.row) for tie in theirs] == [(1, 29)]


def test_a_near_tie_explains_nothing_else(model):
    assert not judged(model, 0.01).holds
