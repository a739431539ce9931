"""What a difference of paired scores is worth: bootstrap intervals over prompts, McNemar's test for 0/1 scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its interval; without ends where a single sample is all there is."""

    mean: float
    low: float | None
    high: float | None


def paired_interval(
    differences: Sequence[Float[np.ndarray, " samples"]], confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean of the groups' means, resampling prompts within each group.

    One group is a task; several are an average over tasks that gives each the same weight.
    """
    mean = float(np.mean([group.mean() for group in differences]))
    if any(len(group) < 2 for group in differences):
        return Interval(mean, None, None)
    resampled = bootstrap_means(differences, seed)
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(mean, float(low), float(high))


def bootstrap_means(
    differences: Sequence[Float[np.ndarray, " samples"]], seed: int = 0
) -> Float[np.ndarray, " resamples"]:
    """Means of the groups' means over bootstrap samples."""
    random = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for group in differences:
        # Scores have few values: drawing how often each comes up is the same as drawing prompts, and much faster.
        values, counts = np.unique(group, return_counts=True)
        drawn = random.multinomial(len(group), counts / len(group), size=RESAMPLES)
        total += drawn @ values / len(group)
    return total / len(differences)


def loss_limit(losses: Sequence[Float[np.ndarray, " samples"]], confidence: float = CONFIDENCE) -> float:
    """One-sided upper confidence limit of the mean loss, in points (100 is everything).

    A sample that lost everything is added to those seen, spread over the groups: without any loss among n samples the
    limit is then about 3/n, as the exact limit for a share is, while a plain bootstrap would be certain of 0.
    """
    count = sum(map(len, losses))
    resampled = bootstrap_means(losses) + np.random.default_rng(1).poisson(1.0, RESAMPLES) * 100.0 / (count + 1)
    return float(np.quantile(resampled, confidence))


def mcnemar(before: Float[np.ndarray, " samples"], after: Float[np.ndarray, " samples"]) -> float | None:
    """Exact two-sided p-value that 0/100 scores are as often gained as lost; None where scores have values between."""
    from scipy.stats import binomtest

    if not np.isin([before, after], (0.0, 100.0)).all():
        return None
    gained, lost = int((after > before).sum()), int((after < before).sum())
    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
