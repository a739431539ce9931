"""From which prompt length on dropping pays: measured on the device at hand, and remembered beside its programs.

Scoring, selecting and compacting cost time that a short prompt does not earn back. Dense and shortened prefills of a
text, one request at a time, are timed at a few lengths; shorter prompts than the first at which dropping wins (there
and at every longer one measured) are better left whole. The text stands for whatever will be asked: what a prompt
earns depends on what is kept of it.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import jax
import numpy as np

from uniprefill_jax.config import SamplingConfig, UniPrefillConfig
from uniprefill_jax.engine.engine import Engine
from uniprefill_jax.llm import LLM
from uniprefill_jax.result_file import device_name, package_version

SHORTEST = 256
REPEATS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds to the first token of a prompt of so many tokens: the best of `REPEATS`."""

    tokens: int
    dense_seconds: float
    dropping_seconds: float


@dataclass(frozen=True)
class BreakEven:
    """What was measured.

    Attributes:
        dense_below: prompts with fewer tokens are faster left whole; beyond the longest measured one where dropping
            never won.
        timings: by length, rising.
    """

    dense_below: int
    timings: tuple[Timing, ...]

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> "BreakEven":
        """The shortest length measured from which on dropping always wins."""
        below = timings[-1].tokens + 1
        for timing in reversed(timings):
            if timing.dropping_seconds >= timing.dense_seconds:
                break
            below = timing.tokens
        return cls(below, tuple(timings))


def measure_break_even(
    engine: Engine,
    config: UniPrefillConfig,
    longest: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BreakEven:
    """Time an engine without requests at 256, 512, ... up to `longest` tokens (or as many as it takes).

    Programs should be compiled (`warm_up`); each length is run once beforehand in any case.
    """
    most = engine.most_tokens(1)
    lengths = [SHORTEST]
    while 2 * lengths[-1] <= min(longest or most, most):
        lengths.append(2 * lengths[-1])
    timings = []
    for number, length in enumerate(lengths):
        if progress is not None:
            progress(number, len(lengths))
        prompt = _text_ids(engine.llm, min(length, most))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(REPEATS + 1):
            for dense in (True, False):
                taken = _first_token_seconds(engine, prompt, UniPrefillConfig.dense() if dense else config)
                if repeat:
                    seconds[dense].append(taken)
        timings.append(Timing(len(prompt), min(seconds[True]), min(seconds[False])))
    if progress is not None:
        progress(len(lengths), len(lengths))
    return BreakEven.of(timings)


def store_break_even(engine: Engine, config: UniPrefillConfig, found: BreakEven) -> Path:
    """Remember a measurement for this model, device and setting; where it lies."""
    path, key = _place(engine, config)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = key | {"dense_below": found.dense_below, "timings": [asdict(timing) for timing in found.timings]}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def stored_break_even(engine: Engine, config: UniPrefillConfig) -> BreakEven | None:
    """What was measured for this model, device and setting, if it was."""
    path, key = _place(engine, config)
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if any(content.get(name) != value for name, value in key.items()):
        return None
    return BreakEven(content["dense_below"], tuple(Timing(**timing) for timing in content["timings"]))


def _place(engine: Engine, config: UniPrefillConfig) -> tuple[Path, dict[str, object]]:
    """The file, in the folder of compiled programs, and everything that a measurement depends on."""
    llm = engine.llm
    key: dict[str, object] = {
        "model": hashlib.sha256(repr(llm.config).encode()).hexdigest(),
        "dtype": llm.dtype,
        "device": device_name(),
        "config": asdict(config) | {"drop_layers": str(config.drop_layers)},
        "engine": asdict(engine.config),
        "versions": {package: package_version(package) for package in ("jax", "uniprefill-jax")},
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(jax.config.jax_compilation_cache_dir)
    return folder / f"dense-below-{name}.json", key


def _first_token_seconds(engine: Engine, prompt: list[int], config: UniPrefillConfig) -> float:
    engine.forget_prefixes()
    start = time.perf_counter()
    engine.submit(prompt, config, SamplingConfig(max_tokens=1))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def _text_ids(llm: LLM, length: int) -> list[int]:
    """Tokens of a text, over and over where it is too short; random ones for a model without a tokenizer."""
    if llm.tokenizer is None:
        return np.random.default_rng(length).integers(0, llm.config.vocab_size, length).tolist()
    text = resources.files("uniprefill_jax.demo").joinpath("areopagitica.txt").read_text(encoding="utf-8")
    ids = llm.tokenizer.encode(text)
    return (ids * -(-length // len(ids)))[:length]
