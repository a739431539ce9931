"""Top-p selection: the library's batched float32 rule against the float64 rule, and its properties."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.top_p_select import top_p_select
from tests.sparsify.rule import Rule, choose

# Fixed array shapes, so that one compilation serves every example of a setting.
REQUESTS, BLOCKS, ROWS = 4, 12, 512
SIZES = {"block_size": 16, "sink_tokens": 32, "window_tokens": 24}

lengths_strategy = st.lists(
    st.one_of(st.integers(0, 128), st.sampled_from([0, 1, 15, 16, 17, 55, 56, 57, 63, 64, 65, 127, 128])),
    min_size=REQUESTS,
    max_size=REQUESTS,
)
score_strategy = st.integers(0, 2**31)
top_p_strategy = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)
cuts = st.sampled_from(["crossing", "below"])
overs = st.sampled_from(["all", "candidates"])


def draw_scores(seed: int) -> np.ndarray:
    """Positive scores over several orders of magnitude, poisoned with NaN beyond each request by `run`."""
    return np.exp(np.random.default_rng(seed).normal(0, 2, (REQUESTS, BLOCKS))).astype(np.float32)


select = partial(
    jax.jit,
    static_argnames=("num_rows", "block_size", "sink_tokens", "window_tokens", "cut", "over"),
)(top_p_select)


def run(scores: np.ndarray, lengths: list[int], rule: Rule) -> tuple[list[np.ndarray], object]:
    """The library's kept places of every request, and the raw selection; padding is poisoned."""
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    scores = scores.copy()
    for request, length in enumerate(lengths):
        scores[request, -(-length // rule.block_size) :] = np.nan
    selection = select(
        jnp.asarray(scores),
        jnp.asarray(cu_seqlens),
        jnp.float32(rule.top_p),
        num_rows=ROWS,
        block_size=rule.block_size,
        sink_tokens=rule.sink_tokens,
        window_tokens=rule.window_tokens,
        cut=rule.cut,
        over=rule.top_p_over,
    )
    indices, kept_cu = np.asarray(selection.indices), np.asarray(selection.cu_seqlens)
    assert (indices[kept_cu[-1] :] == ROWS).all(), "the tail must be out of range"
    kept = [indices[kept_cu[request] : kept_cu[request + 1]] - cu_seqlens[request] for request in range(len(lengths))]
    return kept, selection


@settings(max_examples=150, deadline=None)
@given(lengths_strategy, score_strategy, top_p_strategy, cuts, overs)
def test_keeps_what_the_float64_rule_keeps(lengths, seed, top_p, cut, over) -> None:
    rule = Rule(top_p=top_p, cut=cut, top_p_over=over, **SIZES)
    scores = draw_scores(seed)
    kept, selection = run(scores, lengths, rule)
    for request, length in enumerate(lengths):
        choice = choose(scores[request], length, rule)
        count = -(-length // rule.block_size)
        np.testing.assert_allclose(selection.normalised[request][:count], choice.normalised, rtol=1e-5)
        assert (np.asarray(selection.normalised[request][count:]) == 0).all()
        if choice.gap > 1e-6:
            np.testing.assert_array_equal(kept[request], np.flatnonzero(choice.kept))


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, score_strategy, top_p_strategy, cuts, overs)
def test_forced_tokens_stay_and_order_is_kept(lengths, seed, top_p, cut, over) -> None:
    rule = Rule(top_p=top_p, cut=cut, top_p_over=over, **SIZES)
    kept, _ = run(draw_scores(seed), lengths, rule)
    for places, length in zip(kept, lengths, strict=True):
        assert (np.diff(places) > 0).all()
        forced = {place for place in range(length) if place < rule.sink_tokens or place >= length - rule.window_tokens}
        assert forced <= set(places.tolist())
        assert places.size == 0 or (places[0] >= 0 and places[-1] == length - 1)
        if length <= rule.sink_tokens + rule.window_tokens:
            assert len(places) == length


@settings(max_examples=40, deadline=None)
@given(lengths_strategy, score_strategy, st.tuples(top_p_strategy, top_p_strategy), cuts, overs)
def test_a_larger_p_keeps_a_superset(lengths, seed, top_ps, cut, over) -> None:
    scores = draw_scores(seed)
    fewer, more = (
        run(scores, lengths, Rule(top_p=top_p, cut=cut, top_p_over=over, **SIZES))[0] for top_p in sorted(top_ps)
    )
    for small, large in zip(fewer, more, strict=True):
        assert set(small.tolist()) <= set(large.tolist())


@settings(max_examples=20, deadline=None)
@given(lengths_strategy, score_strategy, cuts, overs)
def test_p_of_one_keeps_all(lengths, seed, cut, over) -> None:
    kept, _ = run(draw_scores(seed), lengths, Rule(top_p=1.0, cut=cut, top_p_over=over, **SIZES))
    assert [places.tolist() for places in kept] == [list(range(length)) for length in lengths]


@settings(max_examples=30, deadline=None)
@given(lengths_strategy, score_strategy, top_p_strategy, cuts, overs)
def test_a_batch_keeps_what_each_request_keeps_alone(lengths, seed, top_p, cut, over) -> None:
    rule = Rule(top_p=top_p, cut=cut, top_p_over=over, **SIZES)
    scores = draw_scores(seed)
    together, selection = run(scores, lengths, rule)
    for request in range(REQUESTS):
        others_empty = [length if other == request else 0 for other, length in enumerate(lengths)]
        alone, alone_selection = run(scores, others_empty, rule)
        np.testing.assert_array_equal(alone[request], together[request])
        assert alone_selection.cut_margin[request] == selection.cut_margin[request]


def test_equal_scores_keep_the_higher_blocks() -> None:
    rule = Rule(top_p=0.5, **SIZES)
    kept, _ = run(np.ones((REQUESTS, BLOCKS), np.float32), [128, 128, 0, 128], rule)
    # Eight equal blocks; mass before the fifth is 4/8 <= p: blocks 7, 6, 5, 4, 3 stay, and the sink's 0 and 1.
    assert kept[0].tolist() == [*range(32), *range(48, 128)]
    assert kept[2].size == 0


def test_crossing_and_below_differ_by_the_block_at_the_cut() -> None:
    scores = np.ones((REQUESTS, BLOCKS), np.float32)
    scores[:, 3] = 20
    lengths = [128] * REQUESTS
    crossing, _ = run(scores, lengths, Rule(top_p=0.9, cut="crossing", **SIZES))
    below, _ = run(scores, lengths, Rule(top_p=0.9, cut="below", **SIZES))
    # 20/27, then 1/27 each: mass before is .740, .777, .814, .851, .888, .925: crossing keeps six, below five.
    assert len(crossing[0]) - len(below[0]) == 16
    assert set(below[0].tolist()) < set(crossing[0].tolist())


def test_below_always_keeps_the_top_block() -> None:
    scores = np.ones((REQUESTS, BLOCKS), np.float32)
    scores[:, 4] = 1000
    kept, _ = run(scores, [128] * REQUESTS, Rule(top_p=0.01, cut="below", **SIZES))
    assert set(range(64, 80)) <= set(kept[0].tolist())


@pytest.mark.parametrize("over", ["all", "candidates"])
def test_scores_that_are_all_zero_do_no_harm(over: str) -> None:
    scores = np.zeros((REQUESTS, BLOCKS), np.float32)
    kept, selection = run(scores, [128] * REQUESTS, Rule(top_p=0.5, top_p_over=over, **SIZES))
    assert np.isfinite(np.asarray(selection.normalised)).all()
    assert {*range(32), *range(104, 128)} <= set(kept[0].tolist())
