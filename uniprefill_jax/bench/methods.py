"""Time to the first token of the methods that UniPrefill is compared with, on one model, device and set of kernels.

Every method takes turns with dense on fresh prompts, as in `bench ttft`. With random weights attention is flat, so that
what a method leaves out follows from its setting and not from the text: every row says what share was computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uniprefill_jax.bench.ttft import Method as Run
from uniprefill_jax.bench.ttft import Prompts, beside_dense, in_turns, row_labels, timing
from uniprefill_jax.llm import LLM
from uniprefill_jax.sparsify.methods.protocol import Method


@dataclass(frozen=True)
class MethodMeasurement:
    """What is measured at every length.

    Attributes:
        arch: name for the rows.
        methods: measured, each against dense.
        runs, seconds: as of `ttft.Measurement`.
        text: token ids to cut prompts from; None draws them at random.
    """

    arch: str
    methods: tuple[Method, ...]
    runs: int
    seconds: float
    text: np.ndarray | None = None

    def rows(self, llm: LLM, length: int) -> Iterator[dict[str, Any]]:
        """One row for dense, whose times are those of all turns, after one for every other method."""
        prompts = Prompts(llm, length, 1, self.text)
        dense = Run(llm, prompts, "auto", Method())
        dense_flops = dense.plan.dense_flops(np.arange(length))
        dense.run()  # compiles and warms up
        labels = row_labels(llm, self.arch, length, 1)
        times: list[float] = []
        for method in self.methods:
            if method.is_dense:
                continue
            run = Run(llm, prompts, "auto", method)
            run.run()
            ours, theirs = in_turns(run.run, dense.run, self.runs, self.seconds)
            times += theirs
            yield (
                labels
                | {"method": method.name, "kept": [len(kept) for kept in run.positions[0]]}
                | {"computed_attention": run.mean_computed}
                | beside_dense(run, ours, theirs, dense_flops)
            )
        times = times or [dense.run() for _ in range(self.runs)]
        row = {"method": "dense", "kept": [length], "computed_attention": 1.0, "speedup": 1.0, "ideal_speedup": 1.0}
        yield labels | row | timing(times, dense, dense_flops)


def break_even_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every method the shortest measured length from which on, at all longer ones too, it is faster than dense;
    None where it is not even at the longest.

    Where a method leaves out no operations it is dense, or decides and then does what dense does: it is not faster
    there, whatever the clock says.
    """
    found = []
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "dense"):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: -row["n"])
        gaining = []
        for row in own:
            if row["speedup"] <= 1.0 or row["ideal_speedup"] <= 1.0:
                break
            gaining.append(row["n"])
        head = {key: own[0][key] for key in ("arch", "batch", "tp", "dtype", "method")}
        found.append(
            head | {"break_even": gaining[-1] if gaining else None, "lengths": sorted(row["n"] for row in own)}
        )
    return found
