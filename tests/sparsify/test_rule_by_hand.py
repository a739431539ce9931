"""The float64 rule itself, on cases worked out by hand: what every other test leans on."""

import numpy as np
import pytest

from tests.sparsify.rule import Rule, block_scores, choose

SMALL = {"block_size": 2, "sink_tokens": 2, "window_tokens": 2}


def kept_blocks(scores, rule: Rule, length: int | None = None) -> list[int]:
    length = len(scores) * rule.block_size if length is None else length
    kept = choose(np.array(scores, float), length, rule).kept
    return sorted({row // rule.block_size for row in np.flatnonzero(kept)})


def test_the_block_that_crosses_p_stays_under_crossing_and_leaves_under_below() -> None:
    scores = [0.1, 0.5, 0.3, 0.06, 0.04]
    # Order 1, 2, 0, 3, 4; mass before: 0, .5, .8, .9, .96; up to and including: .5, .8, .9, .96, 1.
    assert kept_blocks(scores, Rule(top_p=0.85, cut="crossing", **SMALL)) == [0, 1, 2, 4]
    assert kept_blocks(scores, Rule(top_p=0.6, cut="crossing", **SMALL)) == [0, 1, 2, 4]
    assert kept_blocks(scores, Rule(top_p=0.6, cut="below", **SMALL)) == [0, 1, 4]
    assert kept_blocks(scores, Rule(top_p=0.1, cut="below", **SMALL)) == [0, 1, 4]


def test_candidates_leave_forced_blocks_out_of_the_sum() -> None:
    scores = [0.6, 0.05, 0.15, 0.1, 0.1]
    # Over all blocks the sink's 0.6 is most of p; among candidates (1, 2, 3: sum 0.3) block 2 has one half.
    assert kept_blocks(scores, Rule(top_p=0.4, **SMALL)) == [0, 4]
    assert kept_blocks(scores, Rule(top_p=0.4, top_p_over="candidates", **SMALL)) == [0, 2, 4]
    assert kept_blocks(scores, Rule(top_p=0.6, top_p_over="candidates", **SMALL)) == [0, 2, 3, 4]


def test_ties_go_to_the_higher_index() -> None:
    assert kept_blocks([0.2] * 5, Rule(top_p=0.3, **SMALL)) == [0, 3, 4]


def test_window_forces_tokens_not_blocks() -> None:
    kept = choose(np.array([0.9, 0.02, 0.02, 0.02, 0.04]), 9, Rule(top_p=0.5, **SMALL)).kept
    assert np.flatnonzero(kept).tolist() == [0, 1, 7, 8]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_mass_sums_to_one_and_peak_bounds_it(kv_heads: int) -> None:
    random = np.random.default_rng(0)
    mass, peak = block_scores(random.normal(size=(5, 4, 8)), random.normal(size=(37, kv_heads, 8)), 0.7, 16)
    assert mass.shape == (3,)
    assert mass.sum() == pytest.approx(1)
    assert (peak >= mass).all() and (peak <= 1).all()
