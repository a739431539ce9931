"""Block scores: the library's batched float32 scores against float64, padding poisoned."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_score import block_score
from tests.sparsify.rule import block_scores

REQUESTS, ROWS, WINDOW, HEADS, KV_HEADS, SIZE, BLOCK = 4, 384, 24, 6, 2, 16, 16
NUM_BLOCKS = 12


def batch(lengths: list[int], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(window queries, keys, cu_seqlens) of a packed batch; everything that is not a real token is NaN."""
    random = np.random.default_rng(seed)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    queries = np.full((REQUESTS, WINDOW, HEADS, SIZE), np.nan, np.float32)
    keys = np.full((ROWS, KV_HEADS, SIZE), np.nan, np.float32)
    keys[: cu_seqlens[-1]] = random.normal(0, 1.5, (cu_seqlens[-1], KV_HEADS, SIZE))
    for request, length in enumerate(lengths):
        valid = min(length, WINDOW)
        queries[request, WINDOW - valid :] = random.normal(0, 1.5, (valid, HEADS, SIZE))
    return queries, keys, cu_seqlens


jitted = partial(jax.jit, static_argnames=("num_blocks", "block_size", "scale", "peak", "normalise"))(block_score)


def run(queries: np.ndarray, keys: np.ndarray, cu_seqlens: np.ndarray, **options):
    return jitted(
        jnp.asarray(queries),
        jnp.asarray(keys),
        jnp.asarray(cu_seqlens),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        scale=0.3,
        peak=True,
        **options,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 96), st.sampled_from([0, 1, 15, 16, 17, 23, 24, 25, 63, 64, 65])),
        min_size=REQUESTS,
        max_size=REQUESTS,
    ),
    st.integers(0, 2**31),
)
def test_scores_equal_float64_whatever_the_padding_holds(lengths, seed) -> None:
    queries, keys, cu_seqlens = batch(lengths, seed)
    scores = run(queries, keys, cu_seqlens)
    for request, length in enumerate(lengths):
        count = -(-length // BLOCK)
        assert (np.asarray(scores.mass[request, count:]) == 0).all()
        assert (np.asarray(scores.peak[request, count:]) == 0).all()
        if not length:
            continue
        valid = min(length, WINDOW)
        own_keys = keys[cu_seqlens[request] : cu_seqlens[request + 1]]
        mass, peak = block_scores(queries[request, WINDOW - valid :], own_keys, 0.3, BLOCK)
        np.testing.assert_allclose(scores.mass[request, :count], mass, atol=2e-6)
        np.testing.assert_allclose(scores.peak[request, :count], peak, atol=2e-6)
        assert float(scores.mass[request].sum()) == pytest.approx(1, abs=1e-5)


def test_undivided_sums_add_up_over_shards_of_heads() -> None:
    queries, keys, cu_seqlens = batch([90, 33, 0, 96], 5)
    whole = run(queries, keys, cu_seqlens, normalise=False)
    parts = [
        run(queries[:, :, 3 * kv : 3 * kv + 3], keys[:, kv : kv + 1], cu_seqlens, normalise=False) for kv in (0, 1)
    ]
    np.testing.assert_allclose(whole.mass, parts[0].mass + parts[1].mass, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(whole.peak, np.maximum(parts[0].peak, parts[1].peak), rtol=1e-5)
    mean = run(queries, keys, cu_seqlens).mass[0]
    np.testing.assert_allclose(whole.mass[0] / (HEADS * WINDOW), mean, rtol=1e-5)


def test_extreme_logits_stay_finite() -> None:
    queries, keys, cu_seqlens = batch([96, 96, 96, 96], 7)
    scores = run(1e4 * queries, 1e4 * keys, cu_seqlens)
    assert np.isfinite(np.asarray(scores.mass)).all() and np.isfinite(np.asarray(scores.peak)).all()
    np.testing.assert_allclose(np.asarray(scores.mass).sum(axis=1), 1, atol=1e-5)
