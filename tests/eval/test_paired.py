"""Intervals and tests of paired differences against scipy and by hand."""

import itertools
import warnings

import numpy as np
import pytest
from scipy import stats

from uniprefill_jax.eval.paired import bootstrap_means, loss_limit, mcnemar, paired_interval

RANDOM = np.random.default_rng(3)


def test_interval_is_scipys_percentile_bootstrap():
    differences = RANDOM.normal(-1.0, 20.0, 60)
    ours = paired_interval([differences])
    theirs = stats.bootstrap(
        (differences,), np.mean, n_resamples=20_000, method="percentile", confidence_level=0.95, rng=1
    ).confidence_interval
    assert ours.mean == pytest.approx(differences.mean())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.15)


def test_average_over_tasks_gives_each_the_same_weight():
    groups = [RANDOM.normal(0.0, 30.0, 40), RANDOM.normal(10.0, 5.0, 10)]
    ours = paired_interval(groups)
    theirs = stats.bootstrap(
        groups,
        lambda first, second, axis: (first.mean(axis=axis) + second.mean(axis=axis)) / 2,
        n_resamples=20_000,
        method="percentile",
        rng=1,
    ).confidence_interval
    assert ours.mean == pytest.approx((groups[0].mean() + groups[1].mean()) / 2)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.15)


def test_resampling_follows_the_exact_distribution():
    values = np.asarray([0.0, 1.0, 5.0])
    exact = [np.mean(chosen) for chosen in itertools.product(values, repeat=3)]
    drawn = bootstrap_means([values])
    assert drawn.mean() == pytest.approx(np.mean(exact), abs=0.05)
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, quantile) == pytest.approx(np.quantile(exact, quantile), abs=0.34)


def test_one_sample_has_no_interval():
    interval = paired_interval([np.asarray([3.0])])
    assert interval.mean == 3.0 and interval.low is interval.high is None


def test_mcnemar_is_the_sign_test_of_what_changed():
    before = np.asarray([100.0] * 20 + [0.0] * 20)
    after = before.copy()
    after[:9], after[20:22] = 0.0, 100.0
    assert mcnemar(before, after) == pytest.approx(stats.binomtest(2, 11).pvalue)
    by_hand = 2 * sum(stats.binom.pmf(k, 11, 0.5) for k in range(3))
    assert mcnemar(before, after) == pytest.approx(by_hand)
    assert mcnemar(before, before) == 1.0
    assert mcnemar(before, np.full(40, 50.0)) is None


def test_without_losses_the_limit_is_that_of_the_rule_of_three():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit = loss_limit([np.zeros(300)])
    exact = 100 * stats.beta.ppf(0.95, 1, 300)  # Clopper and Pearson
    assert limit == pytest.approx(exact, rel=0.05)


def test_the_limit_of_a_loss_covers_the_exact_one():
    for lost in (1, 3, 12):
        losses = np.zeros(400)
        losses[:lost] = 100.0
        exact = 100 * stats.beta.ppf(0.95, lost + 1, 400 - lost)
        assert exact * 0.9 < loss_limit([losses]) < exact * 1.25
