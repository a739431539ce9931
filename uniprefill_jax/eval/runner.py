"""Runs cases under every setting, the same prompts for all, in batches that share compiled programs."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import jax
import jax.numpy as jnp

from uniprefill_jax.cache.pools import attention_layers, bytes_of_page
from uniprefill_jax.config import BatchShape, SamplingConfig, UniPrefillConfig
from uniprefill_jax.errors import InputError
from uniprefill_jax.eval.cases import Case
from uniprefill_jax.eval.settings import Setting
from uniprefill_jax.eval.store import Answer, AnswerStore, fingerprint
from uniprefill_jax.llm import LLM
from uniprefill_jax.sparsify.buckets import prompt_bucket
from uniprefill_jax.sparsify.methods.protocol import Method

# A decode step of a small model costs an accelerator nearly the same for one request as for many, so batches are as
# large as memory allows; a CPU gains little from large ones.
ROWS_ON_CPU = 2**13
BYTES_ON_ACCELERATORS = 2**34
MOST_REQUESTS = 128


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        done, total: answers; `done` counts those that were there before.
        new: answers of this run, and `seconds` they took.
        phases: seconds by phase: compiling, prefill, decoding.
    """

    total: int
    done: int = 0
    new: int = 0
    seconds: float = 0.0
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far, compiling included."""
        return (self.total - self.done) * self.seconds / self.new if self.new else None


def run_cases(
    llm: LLM,
    cases: Sequence[Case],
    settings: Sequence[Setting],
    store: AnswerStore,
    shapes: Mapping[int, BatchShape],
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer every case under every setting, but for the answers that `store` has.

    Args:
        llm: the model.
        cases: by length and task.
        settings: each answers all cases.
        store: what is known and takes what is new, batch by batch.
        shapes: of the batches, by the cases' length (see `batch_shapes`).
        report: called after every batch.
    """
    check_lengths(llm, cases)
    progress = Progress(total=len(cases) * len(settings))
    start = time.perf_counter()
    for length_cases in _grouped(cases, lambda case: case.length):
        shape = shapes[length_cases[0].length]
        for setting in settings:
            # Tasks whose answers may be equally long share batches: fewer of them are half empty.
            for alike in _alike(length_cases, setting):
                for at in range(0, len(alike), shape.requests):
                    batch = alike[at : at + shape.requests]
                    known = [store.get(setting.name, case) for case in batch]
                    if None in known:
                        store.add(_answer(llm, batch, setting, shape, progress))
                        progress.new += len(batch)
                    progress.done += len(batch)
                    progress.seconds = time.perf_counter() - start
                    report(progress)
    return progress


def check_lengths(llm: LLM, cases: Sequence[Case]) -> None:
    """InputError for a case that the model cannot take."""
    for case in cases:
        tokens = len(case.prompt) + len(case.continuation)
        if tokens > llm.config.max_position:
            raise InputError(
                f"sample {case.index} of {case.task} at {case.length} has {tokens} tokens, the model takes "
                f"{llm.config.max_position}; leave that length out"
            )


def batch_shapes(llm: LLM, cases: Sequence[Case], batch_size: int | None) -> dict[int, BatchShape]:
    """By length, one size for all batches: the longest prompt of any task, and as many prompts as suit the device.

    `batch_size` overrides the number of prompts.
    """
    affordable = ROWS_ON_CPU if jax.default_backend() == "cpu" else BYTES_ON_ACCELERATORS // _bytes_of_row(llm)
    shapes = {}
    for of_length in _grouped(cases, lambda case: case.length):
        length = prompt_bucket(max(len(case.prompt) for case in of_length))
        most = max(Counter(case.max_tokens for case in of_length).values())
        power = max(affordable // length, 1).bit_length() - 1
        requests = min(batch_size or min(2**power, MOST_REQUESTS), most)
        new_tokens = max(len(case.continuation) + case.max_tokens for case in of_length)
        shapes[of_length[0].length] = BatchShape(requests, length, new_tokens)
    return shapes


def _bytes_of_row(llm: LLM) -> int:
    """What a prompt token takes in all caches, and about what it takes in one layer while that is computed."""
    config = llm.config
    cached = len(attention_layers(config)) * bytes_of_page(config, 1, llm.dtype)
    return cached + jnp.dtype(llm.dtype).itemsize * (4 * config.hidden_size + 2 * config.intermediate_size)


def _answer(llm: LLM, batch: list[Case], setting: Setting, shape: BatchShape, progress: Progress) -> list[Answer]:
    completions = llm.generate(
        [case.prompt for case in batch],
        setting.config,
        SamplingConfig(max_tokens=batch[0].max_tokens),
        continuations=[case.continuation for case in batch] if any(case.continuation for case in batch) else None,
        shape=shape,
    )
    answers = []
    for case, completion in zip(batch, completions, strict=True):
        prefill = completion.prefill
        answers.append(
            Answer(
                length=case.length,
                task=case.task,
                index=case.index,
                setting=setting.name,
                prompt=fingerprint(case),
                prediction=completion.text,
                metric=case.metric,
                score=case.score(completion),
                kept=prefill.segment_lengths,
                flop_fraction=prefill.flop_fraction,
                prefill_ms=1e3 * prefill.seconds / len(batch),
            )
        )
    first = completions[0]
    progress.phases["compiling"] += first.prefill.compile_seconds + first.decode_compile_seconds
    progress.phases["prefill"] += first.prefill.seconds
    progress.phases["decoding"] += first.decode_seconds
    return answers


def _alike(cases: Sequence[Case], setting: Setting) -> Iterator[list[Case]]:
    """Cases that may share a batch: answers as long at most, and one setting for the lengths of their prompts.

    The model would divide a batch by settings itself, and its times would then be those of parts.
    """
    for alike in _grouped(cases, lambda case: case.max_tokens):
        parts: dict[UniPrefillConfig | Method, list[Case]] = {}
        for case in alike:
            parts.setdefault(setting.config.for_length(len(case.prompt)), []).append(case)
        yield from parts.values()


def _grouped[Key](cases: Sequence[Case], key: Callable[[Case], Key]) -> Iterator[list[Case]]:
    for _, group in groupby(cases, key=key):
        yield list(group)
