"""The trained model that comes with the package answers dense, and dropping the wrong blocks takes that away."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import uniprefill_jax as up
from checkpoints_convert import find_packaged, load_parameters, open_checkpoint
from training.architecture import CONFIG
from training.card import card
from training.evaluation import ANSWER_ROOM, Evaluator, make_probes
from uniprefill_jax.models.causal_lm import CausalLM, ignored_tensors
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import parameter_specs

ALIAS = "qwen3-next-needles"
DROPPING = up.UniPrefillConfig(
    block_size=32, sink_tokens=32, window_tokens=64, score="peak", score_memory=0.5, top_p_over="candidates"
)


@pytest.fixture(scope="module")
def llm():
    return up.LLM.load(ALIAS, dtype="float32")


def test_it_is_what_training_makes(tokenizer):
    """Small enough for a repository, of the trainer's own shape, with its tokenizer and a card of its own numbers."""
    folder = find_packaged(ALIAS)
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8 * 2**20
    assert open_checkpoint(ALIAS).config == CONFIG
    bundled, made = (json.loads(text) for text in ((folder / "tokenizer.json").read_text(), tokenizer.to_str()))
    assert bundled["model"] == made["model"] and bundled["pre_tokenizer"] == made["pre_tokenizer"]
    assert (folder / "README.md").read_text() == card(folder)
    rows = json.loads((folder / "evaluation.json").read_text())["rows"]
    dense = {row["task"]: row["dense"] for row in rows if row["length"] == 4096}
    assert min(dense["single"], dense["multikey"]) >= 0.95


def test_it_answers_needles(llm, pieces):
    probes = make_probes(pieces, "multikey", 512, 4, seed=11)
    prompts = np.asarray(probes.tokens)[:, :-ANSWER_ROOM].tolist()
    answers = llm.generate(prompts, up.UniPrefillConfig.dense(), up.SamplingConfig(max_tokens=8))
    expected = [
        tokens[-ANSWER_ROOM:][:length].tolist()
        for tokens, length in zip(np.asarray(probes.tokens), probes.answer_length, strict=True)
    ]
    assert [answer.finish_reason for answer in answers] == ["stop"] * 4
    assert [answer.text for answer in answers] == [llm.tokenizer.decode(tokens) for tokens in expected]


@pytest.mark.slow
def test_a_random_choice_of_blocks_hurts(pieces):
    """The same numbers of tokens: chosen by the rule most questions are answered, chosen at random few are."""
    model = CausalLM(read_model_config(CONFIG), jnp.dtype(jnp.float32))
    source = open_checkpoint(ALIAS)
    parameters = load_parameters(
        source, parameter_specs(model), dtype=jnp.float32, ignore=ignored_tensors(model.config)
    )
    evaluator = Evaluator(model, DROPPING, batch=8)
    probes = make_probes(pieces, "single", 576, 8, seed=5)
    by_rule = evaluator.answers(parameters, probes, "rule", top_p=0.7)
    kept = np.asarray(by_rule.kept)
    at_random = evaluator.answers(parameters, probes, "random", kept)
    assert kept.mean(axis=1).max() < 0.65 * 576
    assert np.asarray(by_rule.right).mean() >= 0.75
    assert np.asarray(at_random.right).mean() <= 0.5
