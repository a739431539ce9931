"""What is trained is the library's function: gradients, logits, drops, and transformers on what was saved."""

import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import uniprefill_jax as up
from training.architecture import CONFIG, initial_parameters
from training.batches import make_stack
from training.documents import TASKS
from training.evaluation import Evaluator, Probes, make_probes
from training.export import save_checkpoint
from training.forward import hidden_states
from training.learning import Batch, in_model_dtype, loss, start, train_steps
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import read_model_config

# The real model but for its depth and width.
SMALL = CONFIG | {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
DROPPING = up.UniPrefillConfig(top_p=0.6, drop_layers=(1,), block_size=32, sink_tokens=32, window_tokens=64)


@pytest.fixture(scope="module")
def model():
    return CausalLM(read_model_config(SMALL), jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def parameters():
    """Values that bfloat16 holds exactly, matrices large enough that attention is not flat."""
    drawn = initial_parameters(SMALL, 0)
    larger = {path: value * (2.0 if value.ndim > 2 else 1.0) for path, value in drawn.items()}
    return {path: value.astype(jnp.bfloat16).astype(jnp.float32) for path, value in larger.items()}


@pytest.fixture(scope="module")
def folder(parameters, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    save_checkpoint(path, SMALL, parameters, tokenizer)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    return up.LLM.load(folder, dtype="float32")


def relative_error(found, expected):
    return np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected)


@pytest.mark.slow
def test_gradients_equal_differences(model, pieces):
    tokens, question, tasks = (array[0] for array in make_stack(pieces, (1, 2, 256), (5,)))
    batch = Batch(*map(jnp.asarray, (tokens, question, tasks)))
    parameters = initial_parameters(SMALL, 2)
    function = jax.jit(jax.value_and_grad(lambda parameters: loss(model, parameters, batch)[0]))
    _, gradients = function(parameters)
    assert all(float(jnp.abs(gradient).max()) > 0 for gradient in gradients.values())
    # Along the gradient itself, and so little that no router changes its choice.
    norm = float(jnp.sqrt(sum((gradient**2).sum() for gradient in gradients.values())))
    step = 2e-4 / norm
    moved = ({path: parameters[path] + sign * step * gradients[path] for path in parameters} for sign in (1, -1))
    ahead, behind = (float(function(those)[0]) for those in moved)
    assert (ahead - behind) / (2 * step) == pytest.approx(norm**2, rel=0.02)


def test_logits_equal_the_library_and_transformers(model, parameters, folder, llm, pieces, pytestconfig, tmp_path):
    ids = np.asarray(make_probes(pieces, "multikey", 320, 2, seed=3).tokens)[:, :320]
    with_values = in_model_dtype(model, parameters)
    rows, balance = jax.jit(lambda tokens: hidden_states(with_values, tokens))(jnp.asarray(ids))
    logits = np.asarray(with_values.logits(rows)).reshape(*ids.shape, -1)
    assert float(balance) >= 0.99
    for result, own in zip(llm.prefill(ids.tolist(), up.UniPrefillConfig.dense()), logits, strict=True):
        assert relative_error(own[-1], result.logits) < 1e-4
    np.save(tmp_path / "ids.npy", ids)
    script = Path(__file__).with_name("transformers_logits.py")
    command = [pytestconfig.getoption("--oracle-python"), str(script), str(folder), "ids.npy", "logits.npy"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    errors = [
        relative_error(own, theirs)
        for own, theirs in zip(
            logits.reshape(-1, 2048), np.load(tmp_path / "logits.npy").reshape(-1, 2048), strict=True
        )
    ]
    assert np.median(errors) < 1e-5
    assert np.quantile(errors, 0.99) < 1e-3  # an expert may change sides in float32


@pytest.mark.slow
def test_drops_equal_the_library(model, parameters, llm, pieces):
    """An answer is right under the rule exactly where the library, dropping, writes it."""
    probes = make_probes(pieces, "multikey", 512, 4, seed=3)
    prompts = np.asarray(probes.tokens)[:, :512].tolist()
    written = llm.generate(prompts, DROPPING, up.SamplingConfig(max_tokens=6, ignore_eos=True))
    tokens = np.array(probes.tokens)
    tokens[:, 512:518] = [completion.token_ids for completion in written]
    tokens[1, 514] += 1
    evaluator = Evaluator(model, DROPPING, batch=4)
    probes = Probes(jnp.asarray(tokens), jnp.full(4, 6, jnp.int32))
    by_rule = evaluator.answers(parameters, probes, "rule", top_p=DROPPING.top_p)
    assert by_rule.right.tolist() == [True, False, True, True]
    lengths = [[len(kept) for kept in completion.prefill.kept_positions.values()] for completion in written]
    assert np.asarray(by_rule.kept).T.tolist() == lengths
    assert max(max(own) for own in lengths) < 512
    for choice in ("random", "recent"):
        others = evaluator.answers(parameters, probes, choice, np.asarray(by_rule.kept))
        np.testing.assert_array_equal(others.kept, by_rule.kept)
    written = llm.generate(prompts, up.UniPrefillConfig.dense(), up.SamplingConfig(max_tokens=6, ignore_eos=True))
    tokens[:, 512:518] = [completion.token_ids for completion in written]
    dense = evaluator.answers(parameters, probes._replace(tokens=jnp.asarray(tokens)), "dense")
    assert dense.right.all() and (np.asarray(dense.kept) == 512).all()


@pytest.mark.slow
def test_the_loss_falls(model, pieces):
    """Sixteen steps on one stack of documents: it is learnt by heart, and the counts of right answers say so."""
    stack = Batch(*(jnp.asarray(array) for array in make_stack(pieces, (1, 2, 256), (7,))))
    state = start(model, initial_parameters(SMALL, 1))
    run = jax.jit(partial(train_steps, model))
    repeated = Batch(*(jnp.repeat(array, 16, axis=0) for array in stack))
    losses = []
    for _ in range(4):
        state, metrics = run(state, repeated, jnp.full(16, 3e-3))
        losses.append(np.asarray(metrics.answer_loss))
    assert losses[0][0] > 6.0  # about log 2048
    assert losses[-1][-1] < 0.7 * losses[0][0]
    asked = np.asarray(metrics.asked[-1])
    expected = np.bincount(np.asarray(stack.tasks)[np.asarray(stack.tasks) >= 0], minlength=len(TASKS))
    np.testing.assert_array_equal(asked, expected)
    assert (np.asarray(metrics.right) <= asked).all()
