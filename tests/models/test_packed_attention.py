"""Packed rows and causal attention over them, against masks built row by row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uniprefill_jax.models.batch import PackingRules, last_rows, pack_rows
from uniprefill_jax.models.causal_attention import causal_attention

WINDOWS = (None, 1, 5, 40)


def packed(lengths: list[int], num_rows: int, gaps: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions with random gaps (tokens were dropped) and cumulative lengths."""
    positions = np.zeros(num_rows, np.int32)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        positions[start:stop] = np.cumsum(gaps.integers(1, 4, stop - start)) - 1
    return positions, cu_seqlens


def visible_rows(positions, cu_seqlens, window, meaning) -> np.ndarray:
    """Which rows each row sees, straight from the definition."""
    num_rows = len(positions)
    mask = np.zeros((num_rows, num_rows), bool)
    for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        for row in range(start, stop):
            for other in range(start, row + 1):
                distance = positions[row] - positions[other] if meaning == "position" else row - other
                mask[row, other] = window is None or distance < window
    return mask


pack = jax.jit(pack_rows, static_argnames="rules")


@given(st.lists(st.integers(0, 90), min_size=4, max_size=4), st.sampled_from(["position", "kept"]), st.integers(0, 99))
@settings(max_examples=40)
def test_row_starts_match_the_definition(lengths, meaning, seed):
    positions, cu_seqlens = packed(lengths, 384, np.random.default_rng(seed))
    rules = PackingRules(WINDOWS, (), meaning, None, "xla")
    rows = pack(jnp.asarray(positions), jnp.asarray(cu_seqlens), rules=rules)
    for window in WINDOWS:
        mask = visible_rows(positions, cu_seqlens, window, meaning)
        start = np.asarray(rows.row_start(window))
        index = np.arange(384)
        count = cu_seqlens[-1]
        expected = (index[None, :] >= start[:, None]) & (index[None, :] <= index[:, None])
        np.testing.assert_array_equal(expected[:count], mask[:count])
        # Padding rows see themselves: defined, and no real row.
        np.testing.assert_array_equal(start[count:], index[count:])
        assert (np.diff(start) >= 0).all()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [[700], [1, 300, 255, 0, 130], [256, 257]])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
def test_attention_matches_a_dense_mask(window, lengths, heads):
    num_heads, num_kv_heads = heads
    random = np.random.default_rng(len(lengths))
    positions, cu_seqlens = packed(lengths, 704, random)
    rules = PackingRules((None, window) if window else (None,), (), "position", None, "xla")
    rows = pack_rows(jnp.asarray(positions), jnp.asarray(cu_seqlens), rules)
    queries, keys, values = (
        jnp.asarray(random.standard_normal((704, count, 32), dtype=np.float32))
        for count in (num_heads, num_kv_heads, num_kv_heads)
    )
    attend = jax.jit(partial(causal_attention, scale=0.3))
    output = np.asarray(attend(queries, keys, values, rows.row_start(window), rows.count))
    count = cu_seqlens[-1]
    mask = visible_rows(positions, cu_seqlens, window, "position")[:count, :count]
    for head in range(num_heads):
        scores = (
            0.3
            * np.asarray(queries[:count, head], np.float64)
            @ np.asarray(keys[:count, head * num_kv_heads // num_heads], np.float64).T
        )
        weights = np.where(mask, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        weights /= weights.sum(-1, keepdims=True)
        expected = weights @ np.asarray(values[:count, head * num_kv_heads // num_heads], np.float64)
        assert np.linalg.norm(output[:count, head] - expected) <= 2e-6 * np.linalg.norm(expected)
    assert np.isfinite(output).all()


def test_map_rows_in_chunks_equals_all_at_once():
    random = np.random.default_rng(0)
    positions, cu_seqlens = packed([100, 211], 512, random)
    x = jnp.asarray(random.standard_normal((512, 8), dtype=np.float32))

    def function(x, positions):
        return {"double": 2 * x, "sum": x.sum(-1) + positions}

    outputs = []
    for chunk in (None, 64):
        rows = pack_rows(
            jnp.asarray(positions), jnp.asarray(cu_seqlens), PackingRules((None,), (), "position", chunk, "xla")
        )
        outputs.append(jax.jit(lambda rows, x: rows.map_rows(function, x, rows.positions))(rows, x))
    np.testing.assert_array_equal(outputs[0]["double"][:311], outputs[1]["double"][:311])
    np.testing.assert_allclose(outputs[0]["sum"][:311], outputs[1]["sum"][:311], rtol=1e-6)
    assert (np.asarray(outputs[1]["double"])[320:] == 0).all()


def test_last_rows_are_right_aligned():
    rows = last_rows(jnp.asarray([0, 5, 5, 7]), 3)
    assert rows.tolist() == [[2, 3, 4], [2, 3, 4], [4, 5, 6]]
