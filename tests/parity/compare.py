"""Comparisons that the parity tests share."""

import numpy as np

import uniprefill_jax as up
from tests.oracle.small_models import NEW_TOKENS
from tests.parity.plain_model import PlainModel, Trace
from tests.sparsify.rule import Rule

# A kept set is held to be equal where the float64 outcome is at least this far (in normalised score) from another one.
CLEAR_GAP = 1e-5
LOGIT_TOLERANCE = 1e-4


def greedy(tokens: int = NEW_TOKENS) -> up.SamplingConfig:
    """Greedy decoding of a fixed number of tokens."""
    return up.SamplingConfig(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """||ours - theirs|| / ||theirs||."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def divergence(logits: np.ndarray, other: np.ndarray) -> float:
    """KL(softmax(logits) || softmax(other)), in nats."""
    first, second = (_log_softmax(np.asarray(values, np.float64)) for values in (logits, other))
    return float((np.exp(first) * (first - second)).sum())


def _log_softmax(values: np.ndarray) -> np.ndarray:
    values = values - values.max()
    return values - np.log(np.exp(values).sum())


def assert_same_greedy(ours: list[int], theirs: np.ndarray, margins: np.ndarray, noise: float) -> None:
    """Equal up to the first token whose top-2 margin lies within the noise; the first 16 must be clear of it."""
    unclear = np.flatnonzero(np.asarray(margins) <= noise)
    compared = int(unclear[0]) if len(unclear) else len(theirs)
    assert compared >= 16, f"the oracle's margin at token {compared} is {margins[compared]:.2e}: choose another prompt"
    assert list(ours[:compared]) == theirs[:compared].tolist()


def library_config(rule: Rule) -> up.UniPrefillConfig:
    """The library's spelling of a rule."""
    return up.UniPrefillConfig(**rule.__dict__)


def assert_equals_plain(completion: up.Completion, prompt: np.ndarray, plain: PlainModel, rule: Rule) -> Trace:
    """Hold a greedy completion against the plain model, run over prompt and generated tokens with the same kept sets.

    Every drop's kept set must be what the rule says, given the sets before it; block mass, cut margin and KV lengths,
    the last token's logits, and every generated token must follow.
    """
    result = completion.prefill
    tokens = np.concatenate([prompt, np.asarray(completion.token_ids[:-1], np.int64)])
    kept = {layer: np.asarray(positions) for layer, positions in result.kept_positions.items()}
    assert sorted(kept) == sorted(rule.drop_layers)
    trace = plain.forward(tokens, len(prompt), rule, kept)
    for layer, choice in trace.choices.items():
        where = f"drop layer {layer}"
        if choice.gap > CLEAR_GAP:
            np.testing.assert_array_equal(kept[layer], trace.kept[layer], err_msg=where)
        np.testing.assert_allclose(result.block_mass[layer], choice.normalised, atol=2e-5, err_msg=where)
        if np.isfinite(choice.margin):
            np.testing.assert_allclose(result.cut_margin[layer], choice.margin, atol=2e-5, err_msg=where)
    assert np.asarray(result.kv_lengths).tolist() == trace.kv_lengths
    error = relative_error(result.logits, trace.logits[0])
    print(f"kept {[len(positions) for positions in kept.values()]} of {len(prompt)}, relative logit error {error:.1e}")
    assert error <= LOGIT_TOLERANCE
    top = np.sort(trace.logits, axis=1)
    noise = LOGIT_TOLERANCE * float(trace.logits.std())
    assert_same_greedy(completion.token_ids, trace.logits.argmax(axis=1), top[:, -1] - top[:, -2], noise)
    return trace
