"""Runs one prompt dense and with UniPrefill and measures the time to the first token of both."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from uniprefill_jax.config import SamplingConfig, UniPrefillConfig
from uniprefill_jax.demo.document import SECRET
from uniprefill_jax.llm import LLM
from uniprefill_jax.results import PrefillResult

Step = Callable[[str], AbstractContextManager[Any]]


@dataclass
class MethodRun:
    """What one method did with the prompt.

    Attributes:
        method: "dense" or "uniprefill".
        answer: text of the greedy continuation.
        prefill: result of the prefill that the answer continues.
        seconds: times to the first token of the measured runs, compilation not included.
    """

    method: str
    answer: str
    prefill: PrefillResult
    seconds: list[float] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether the answer contains the planted fact."""
        return SECRET in self.answer

    @property
    def time_to_first_token(self) -> float:
        """Median of the measured runs, seconds."""
        return median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """Dense and UniPrefill on the same prompt, measured in the same process."""

    dense: MethodRun
    uniprefill: MethodRun

    @property
    def speedup(self) -> float:
        """Measured: dense time to the first token over UniPrefill's."""
        return self.dense.time_to_first_token / self.uniprefill.time_to_first_token

    def rows(self, arch: str, dtype: str) -> list[dict[str, Any]]:
        """One row per method for a result file."""
        return [self._row(run, arch, dtype) for run in (self.dense, self.uniprefill)]

    def _row(self, run: MethodRun, arch: str, dtype: str) -> dict[str, Any]:
        dense_seconds = self.dense.time_to_first_token
        return {
            "arch": arch,
            "n": run.prefill.segment_lengths[0],
            "batch": 1,
            "method": run.method,
            "dtype": dtype,
            "kept": list(run.prefill.segment_lengths),
            "ttft_ms": 1e3 * run.time_to_first_token,
            "ttft_ms_runs": [1e3 * seconds for seconds in run.seconds],
            "dense_ttft_ms": 1e3 * dense_seconds,
            "ideal_speedup": run.prefill.ideal_speedup,
            "speedup": dense_seconds / run.time_to_first_token,
            "flop_fraction": run.prefill.flop_fraction,
            "compile_s": run.prefill.compile_seconds,
            "answer": run.answer,
            "answer_is_right": run.is_right,
        }


def compare(
    llm: LLM, token_ids: list[int], config: UniPrefillConfig, *, runs: int, max_tokens: int, step: Step
) -> Comparison:
    """Answer the prompt dense and with `config`, and time both prefills in turns, so that both see the same load.

    Args:
        llm: the loaded model.
        token_ids: the prompt.
        config: UniPrefill's setting.
        runs: measured prefills of each method, that of the answer included.
        max_tokens: most tokens of an answer.
        step: names what is going on, as a context manager.
    """
    sampling = SamplingConfig(max_tokens=max_tokens, stop=("\n",))
    answered: list[tuple[MethodRun, UniPrefillConfig]] = []
    for method, setting in (("dense", UniPrefillConfig.dense()), ("uniprefill", config)):
        with step(f"Compiling and answering, {method}"):
            completion = llm.generate([token_ids], setting, sampling)[0]
        run = MethodRun(method, completion.text.strip(), completion.prefill, [completion.prefill.seconds])
        answered.append((run, setting))
    for number in range(1, runs):
        for run, setting in answered:
            with step(f"Timing {run.method}, {number + 1} of {runs}"):
                run.seconds.append(llm.prefill([token_ids], setting)[0].seconds)
    (dense, _), (uniprefill, _) = answered
    return Comparison(dense, uniprefill)
