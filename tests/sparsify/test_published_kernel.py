"""Kept sets of the released UniPrefill operator (Triton, bfloat16, H200) on synthetic inputs, and the library's.

The operator rounds scores and sums to bfloat16, so near-equal blocks change places: a block may differ only if its mass
is within 1% of the mass at the cut, and the number of kept blocks by at most one per request. One-token requests are
decode rows. A partial last block and requests shorter than the window are quirks of the operator and are not compared.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import uniprefill_jax as up
from tests.data.make_inputs import make_inputs
from tests.sparsify.rule import Rule, block_scores, choose

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "official_selection.npz")
LONGEST = 16_384
CASES = json.loads(bytes(GOLDEN["cases"]))


def rule_of(case: dict) -> Rule:
    return Rule(top_p=case["p"], block_size=case["G"], sink_tokens=case["A"], window_tokens=case["n"])


def requests(case: dict):
    """(window queries, keys, the operator's kept mask) of every request, in bfloat16 as the operator saw them."""
    queries, keys = make_inputs(**case)
    queries, keys = (array.astype(ml_dtypes.bfloat16).astype(np.float32) for array in (queries, keys))
    mask = np.unpackbits(GOLDEN[f"mask_{case['seed']}"])[: sum(case["lens"])].astype(bool)
    start = 0
    for length in case["lens"]:
        rows = slice(start, start + length)
        yield queries[rows][-case["n"] :], keys[rows], mask[rows]
        start += length


def assert_like_published(kept: np.ndarray, published: np.ndarray, mass: np.ndarray, rule: Rule) -> None:
    length = len(kept)
    if length <= rule.sink_tokens + rule.window_tokens:
        assert kept.all()
        return
    starts = np.arange(0, length // rule.block_size * rule.block_size, rule.block_size)
    ours = np.array([kept[start : start + rule.block_size].all() for start in starts])
    theirs = np.array([published[start : start + rule.block_size].all() for start in starts])
    order = sorted(range(len(mass)), key=lambda block: (-mass[block], -block))
    before = np.cumsum(mass[order]) - mass[order]
    at_cut = mass[order[int((before <= rule.top_p).sum()) - 1]]
    for block in np.flatnonzero(ours != theirs):
        assert abs(mass[block] - at_cut) <= 0.01 * at_cut, f"block {block}: mass {mass[block]:.5f}, cut at {at_cut:.5f}"
    assert abs(int(ours.sum()) - int(theirs.sum())) <= 1


@pytest.mark.parametrize("case", CASES, ids=[str(case["seed"]) for case in CASES])
def test_keeps_what_the_published_kernel_kept(case: dict) -> None:
    rule = rule_of(case)
    config = up.UniPrefillConfig(
        top_p=rule.top_p, block_size=rule.block_size, sink_tokens=rule.sink_tokens, window_tokens=rule.window_tokens
    )
    for queries, keys, published in requests(case):
        length = len(keys)
        if length == 1:
            assert published.all()
            continue
        mass, _ = block_scores(queries, keys, case["D"] ** -0.5, case["G"])
        assert_like_published(choose(mass, length, rule).kept, published, mass, rule)
        # Padding, so that few shapes are compiled; it must not matter what it holds.
        padding = np.full((LONGEST - length, *keys.shape[1:]), np.nan, np.float32)
        ours = up.score_blocks(queries, np.concatenate([keys, padding]), length, block_size=case["G"])[: len(mass)]
        np.testing.assert_allclose(ours, mass, atol=1e-5)
        assert_like_published(np.asarray(up.select_tokens(ours, length, config)), published, mass, rule)
