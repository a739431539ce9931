"""What dropping can do to a row of attention: the bound 2 m V_max, and what the cut says about m.

If the dropped tokens carry mass m of a row's softmax, the renormalised output over the rest moves by at most 2 m V_max
(V_max: largest norm of a value). The cut is made on the mean over heads and window rows, so it promises m <= 1 - p for
that mean only; a single row's m may be larger.
"""

import numpy as np
import pytest

import uniprefill_jax as up

LENGTH, WINDOW, HEADS, KV_HEADS, SIZE = 640, 32, 4, 2, 16


def attention(queries: np.ndarray, keys: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Softmax weights [heads, rows, tokens] of the last rows over the kept tokens, float64."""
    keys = np.repeat(keys.astype(np.float64), HEADS // KV_HEADS, axis=1)
    logits = np.einsum("nhd,thd->hnt", queries.astype(np.float64), keys) * SIZE**-0.5
    rows = LENGTH - len(queries) + np.arange(len(queries))
    allowed = (np.arange(LENGTH)[None] <= rows[:, None]) & kept[None]
    weights = np.exp(np.where(allowed, logits, -np.inf) - logits.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True)


@pytest.mark.parametrize("sharpness", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("score", ["mean", "peak"])
def test_output_error_is_below_the_bound(sharpness: float, top_p: float, score: str) -> None:
    random = np.random.default_rng(int(100 * sharpness + 1000 * top_p))
    queries = (sharpness * random.normal(size=(WINDOW, HEADS, SIZE)) + 1).astype(np.float32)
    keys = (sharpness * random.normal(size=(LENGTH, KV_HEADS, SIZE))).astype(np.float32)
    values = np.repeat(random.normal(size=(LENGTH, KV_HEADS, SIZE)), HEADS // KV_HEADS, axis=1)
    config = up.UniPrefillConfig(top_p=top_p, block_size=16, sink_tokens=16, window_tokens=WINDOW, score=score)
    scores = up.score_blocks(queries, keys, LENGTH, block_size=16, score=score)
    kept = np.asarray(up.select_tokens(scores, LENGTH, config))
    assert kept.any()

    whole, short = attention(queries, keys, np.ones(LENGTH, bool)), attention(queries, keys, kept)
    dropped_mass = whole[:, :, ~kept].sum(axis=2)
    error = np.linalg.norm(np.einsum("hnt,thd->hnd", whole - short, values), axis=2)
    largest = np.linalg.norm(values, axis=2).max()
    assert (error <= 2 * dropped_mass * largest + 1e-12).all()
    if score == "mean":
        # Forced tokens can only lower it further.
        assert dropped_mass.mean() <= 1 - top_p + 1e-6
