"""Time to the first token's logits: dense against dropping, each run next to its rival's, with the ideal beside it.

A dropping setting is measured in the order dense, dropping, dropping, dense, and so on: every method follows itself as
often as its rival, so that neither profits from what the run before left of the device's power budget. Fresh tokens in
every run; compile time apart.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.execution import LengthsBy
from uniprefill_jax.llm import DTYPES, LLM, Setting
from uniprefill_jax.parallel.mesh import TENSOR
from uniprefill_jax.prefill import PrefillOutput
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers
from uniprefill_jax.sparsify.methods.protocol import Method as PrefillMethod

# Vendor's dense bfloat16 rate, the usual base of model FLOP utilisation.
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}
GIB = 2**30


@dataclass(frozen=True)
class Measurement:
    """What is measured of every (length, batch).

    Attributes:
        arch: name for the rows.
        top_ps: settings of top_p; 1 scores everything and drops nothing, which shows what the machinery costs.
        base: the rest of the setting.
        runs: most timed runs of each method.
        seconds: after so many seconds a pair of methods gets no more runs (but one of each); several processes have to
            agree on the number of runs and do all of them.
        lengths_by: how work follows the kept rows (see `PrefillPlan.for_batch`).
        text: token ids to cut prompts from; None draws them at random.
    """

    arch: str
    top_ps: tuple[float, ...]
    base: UniPrefillConfig
    runs: int
    seconds: float
    lengths_by: LengthsBy = "auto"
    text: np.ndarray | None = None

    def rows(self, llm: LLM, length: int, batch: int) -> Iterator[dict[str, Any]]:
        """One row for dense and one for every top_p; see the design note's result files."""
        prompts = Prompts(llm, length, batch, self.text)
        dense = Method(llm, prompts, self.lengths_by, UniPrefillConfig.dense())
        labels = row_labels(llm, self.arch, length, batch)
        dense_flops = sum(dense.plan.dense_flops(np.arange(length)) for _ in range(batch))
        dense_times: list[float] = []
        rows = []
        dense.run()  # compiles and warms up
        for top_p in self.top_ps:
            method = Method(llm, prompts, self.lengths_by, replace(self.base, top_p=top_p), scored_at_one=True)
            if not rows:
                method.run()  # the one program of all settings of top_p
            ours, theirs = in_turns(method.run, dense.run, self.runs, self.seconds)
            dense_times += theirs
            rows.append(
                labels
                | {"method": "uniprefill", "top_p": top_p, "kept": [len(kept) for kept in method.positions[0]]}
                | beside_dense(method, ours, theirs, dense_flops)
            )
        if not dense_times:
            dense_times = [dense.run() for _ in range(self.runs)]
        yield labels | {"method": "dense", "kept": [length]} | timing(dense_times, dense, dense_flops)
        yield from rows


def row_labels(llm: LLM, arch: str, length: int, batch: int) -> dict[str, Any]:
    """What rows of one model and size have in common."""
    return {"arch": arch, "n": length, "batch": batch, "tp": _devices(llm), "dtype": llm.dtype}


def in_turns(
    ours: Callable[[], float], theirs: Callable[[], float], runs: int, most_seconds: float
) -> tuple[list[float], list[float]]:
    """Seconds of both methods, in the order theirs, ours, ours, theirs; see `Measurement` for `runs` and the limit."""
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    for number in range(2 * runs):
        late = jax.process_count() == 1 and time.perf_counter() - start > most_seconds
        if late and number and number % 2 == 0:
            break
        which = 0 if number % 4 in (1, 2) else 1
        times[which].append((ours, theirs)[which]())
    return times


class Prompts:
    """Batches of equally long prompts, fresh every time."""

    def __init__(self, llm: LLM, length: int, batch: int, text: np.ndarray | None):
        self.lengths = [length] * batch
        self.vocab_size = llm.config.vocab_size
        self.text = text
        self.random = np.random.default_rng([length, batch])

    def draw(self) -> np.ndarray:
        """The token ids of a batch, prompt after prompt."""
        if self.text is None:
            return self.random.integers(0, self.vocab_size, sum(self.lengths)).astype(np.int32)
        starts = self.random.integers(0, len(self.text) - self.lengths[0] + 1, len(self.lengths))
        return np.concatenate([self.text[start : start + self.lengths[0]] for start in starts]).astype(np.int32)


class Method:
    """One setting: its plan, its program, and what its last run kept."""

    def __init__(
        self, llm: LLM, prompts: Prompts, lengths_by: LengthsBy, setting: Setting, scored_at_one: bool = False
    ):
        self.programs = llm.programs
        self.prompts = prompts
        # Asked for top_p = 1 the library drops nothing and so scores nothing; here the scoring is the point.
        dropping = PrefillMethod.of(setting).dropping
        scoring = replace(dropping, top_p=0.5) if scored_at_one else dropping
        drop_layers = resolve_drop_layers(scoring, llm.config)
        self.dtype = DTYPES[llm.dtype]
        self.devices = _devices(llm)
        self.plan = PrefillPlan.for_batch(
            llm.config, setting, drop_layers, prompts.lengths, self.dtype, lengths_by, on_mesh=llm.mesh is not None
        )
        self.compile_seconds = 0.0
        self._compiled: Any = None
        self._segments: Any = None
        self._computed: np.ndarray | None = None

    def prepare(self) -> Callable[[], PrefillOutput]:
        """A prefill of fresh prompts, compiled, its inputs on the device."""
        count = sum(self.prompts.lengths)
        tokens = np.zeros(self.plan.num_rows, np.int32)
        tokens[:count] = self.prompts.draw()
        cu_seqlens = np.full(self.plan.num_requests + 1, count, np.int32)
        cu_seqlens[: len(self.prompts.lengths) + 1] = np.cumsum([0, *self.prompts.lengths])
        inputs = jax.block_until_ready(self.programs.put((tokens, cu_seqlens)))
        program, compiling = self.programs.prefill(self.plan, *inputs)
        self.compile_seconds += compiling
        self._compiled = program.func
        return program

    def run(self) -> float:
        """Seconds of one prefill of fresh prompts.

        Raises:
            FloatingPointError: a logit is not finite.
        """
        program = self.prepare()
        start = time.perf_counter()
        output = jax.block_until_ready(program())
        seconds = time.perf_counter() - start
        self.keep(output)
        return seconds

    def keep(self, output: PrefillOutput) -> None:
        """Take from a run's output what it kept, once its logits are seen to be finite."""
        self._segments, self._computed = jax.device_get((output.segments, output.computed))
        logits = np.asarray(output.logits)[: len(self.prompts.lengths)]
        if not np.isfinite(logits).all():
            tokens = sum(self.prompts.lengths)
            raise FloatingPointError(f"a logit is not finite: {tokens} tokens, top_p {self.plan.config.top_p}")

    @property
    def program_bytes(self) -> int:
        """Memory on each device of the program while it runs: weights, inputs, results, scratch."""
        memory = self._compiled.memory_analysis()
        if memory is None:
            return 0
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        return held - memory.alias_size_in_bytes

    @property
    def program_text(self) -> str:
        """The compiled program, as the compiler spells it."""
        return self._compiled.as_text() or ""

    @property
    def flops_by_step(self) -> dict[str, float]:
        """Operations of the last run by the cost model, by the names that the steps have in a trace."""
        total: defaultdict[str, float] = defaultdict(float)
        for request, positions in enumerate(self.positions):
            computed = self.plan.computed_by_layer(self._computed, request)
            for step, flops in self.plan.flops_by_step(positions, computed).items():
                total[step] += flops
        return dict(total)

    @property
    def mean_computed(self) -> float:
        """Share of full attention that the last run computed, mean over the layers that choose and over requests."""
        if self._computed is None or not self._computed.size:
            return 1.0
        return round(float(self._computed[:, : len(self.prompts.lengths)].mean()), 4)

    @property
    def bytes_by_step(self) -> dict[str, float]:
        """The least bytes that the last run moved, by the same names."""
        return self.plan.bytes_by_step(self.positions, np.dtype(self.dtype).itemsize)

    @property
    def positions(self) -> list[list[np.ndarray]]:
        """Of every request in the last run, the original positions in every segment."""
        pairs = list(zip(self._segments.positions, self._segments.cu_seqlens, strict=True))
        return [
            [row[cu[request] : cu[request + 1]] for row, cu in pairs] for request in range(len(self.prompts.lengths))
        ]


def _devices(llm: LLM) -> int:
    """Devices that share a copy of the model."""
    return 1 if llm.mesh is None else llm.mesh.shape[TENSOR]


def beside_dense(method: Method, ours: Sequence[float], theirs: Sequence[float], dense_flops: float) -> dict[str, Any]:
    """What a row says of a method's times and dense's in turns with it, in seconds."""
    milliseconds, dense_milliseconds = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
    flops = sum(method.flops_by_step.values())
    return timing(ours, method, flops) | {
        "dense_ttft_ms": round(dense_milliseconds, 3),
        "speedup": round(dense_milliseconds / milliseconds, 4),
        "ideal_speedup": round(dense_flops / flops, 4),
    }


def timing(seconds: Sequence[float], method: Method, flops: float) -> dict[str, Any]:
    """What a row says of a method's times, given its operations."""
    median = statistics.median(seconds)
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return {
        "ttft_ms": round(median * 1e3, 3),
        "ttft_min_ms": round(min(seconds) * 1e3, 3),
        "ttft_max_ms": round(max(seconds) * 1e3, 3),
        "runs": len(seconds),
        "tflops_per_second": round(flops / median * 1e-12, 1),
        "mfu": None if peak is None else round(flops / median / (peak * method.devices), 4),
        "peak_gib": round(method.program_bytes / GIB, 2),
        "compile_s": round(method.compile_seconds, 1),
    }
