"""Runs one prompt dense and dropping, warmed, in turns, and times both."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.llm import LLM
from uniprefill_jax.results import PrefillResult

Step = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Timing:
    """Seconds of the timed prefills of both methods, compilation and the warming run not included."""

    dense: Sequence[float]
    dropping: Sequence[float]

    @property
    def dense_seconds(self) -> float:
        """Median of the dense runs."""
        return median(self.dense)

    @property
    def dropping_seconds(self) -> float:
        """Median of the runs that drop."""
        return median(self.dropping)

    @property
    def speedup(self) -> float:
        """Measured: dense time to the first token over that of dropping."""
        return self.dense_seconds / self.dropping_seconds


def measure(
    llm: LLM, token_ids: list[int], config: UniPrefillConfig, *, runs: int, step: Step
) -> tuple[PrefillResult, Timing]:
    """The prefill under `config`, and the times of `runs` further ones beside as many dense ones."""
    settings = {"dense": UniPrefillConfig.dense(), "dropping": config}
    results = {}
    for method, setting in settings.items():
        with step(f"Compiling and warming, {method}"):
            results[method] = llm.prefill([token_ids], setting)[0]
    seconds: dict[str, list[float]] = {method: [] for method in settings}
    for number in range(runs):
        for method, setting in settings.items():
            with step(f"Timing {method}, {number + 1} of {runs}"):
                seconds[method].append(llm.prefill([token_ids], setting)[0].seconds)
    return results["dropping"], Timing(**seconds)
