"""Search for the setting with the fewest operations whose paired loss stays under a limit, with confidence.

Prompts are divided in two. On the first part settings are searched by successive halving: every round has fewer
families of settings and more prompts. A family is a setting but for top_p, which is traced: its ladder compiles
nothing. On the second part, which the search has not seen, the best settings are tested in the order of falling
operations, the safest first, until one fails: a fixed sequence needs no correction for the number of tests.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError
from uniprefill_jax.eval.cases import Case
from uniprefill_jax.eval.paired import CONFIDENCE, loss_limit, paired_interval
from uniprefill_jax.eval.rows import is_able
from uniprefill_jax.eval.runner import Progress, batch_shapes, run_cases
from uniprefill_jax.eval.settings import DENSE, NAMED, Setting
from uniprefill_jax.eval.store import AnswerStore
from uniprefill_jax.llm import LLM
from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers

# From safe to bold; the search goes down until a family loses clearly more than allowed.
TOP_PS = (0.999, 0.99, 0.975, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
CLEARLY = 5.0  # points over the limit, with few prompts
SURVIVORS = (3, 2)  # families that enter the second and the third round
TESTED = 8  # settings in the final sequence
SEARCH_SHARE = 1 / 3  # of the prompts of every task
ROUND_SHARES = (0.25, 0.5, 1.0)  # of the prompts of the search, by round
MOST_BLOCKS = 64  # of the variation whose blocks grow with the prompt: 16 tokens up to 1K, 128 over 4K
# Score, its memory, what top_p counts.
_SCORES = (
    ("mean", 0.0, "all"),
    ("mean", 0.0, "candidates"),
    ("peak", 0.0, "candidates"),
    ("peak", 0.5, "candidates"),
    ("peak", 0.8, "candidates"),
)


@dataclass(frozen=True)
class Measured:
    """A setting on some prompts, beside dense.

    Attributes:
        config: the setting.
        loss: points lost on average over tasks; below 0 where it gained.
        limit: one-sided upper confidence limit of the loss.
        flop_fraction: operations over dense's.
        prompts: how many.
    """

    config: UniPrefillConfig
    loss: float
    limit: float
    flop_fraction: float
    prompts: int


@dataclass(frozen=True)
class Calibration:
    """What a search ended with.

    Attributes:
        chosen: the setting with the fewest operations that passed; None where none did.
        tested: the final sequence, on prompts that the search has not seen.
        tasks: tasks that count; `left_out` are those that the model cannot do even when dense, with its score.
    """

    chosen: Measured | None
    tested: tuple[Measured, ...]
    tasks: tuple[str, ...]
    left_out: dict[str, float]


class Calibrator:
    """One search on one model and one set of prompts."""

    def __init__(
        self,
        llm: LLM,
        cases: Sequence[Case],
        store: AnswerStore,
        max_loss: float,
        batch_size: int | None = None,
        report: Callable[[str, Progress], None] = lambda stage, progress: None,
        tell: Callable[[Measured], None] = lambda measured: None,
    ):
        """Prepare a search.

        Args:
            llm: the model.
            cases: prompts of RULER's tasks, at the lengths that matter.
            store: answers that are there already, and those to come.
            max_loss: most points that may be lost on average over the tasks.
                batch_size: most prompts at a time.
            report: called after every batch with what the search is about.
            tell: called with every setting measured.

        Raises:
            InputError: there are too few prompts to ever be confident of so small a loss.
        """
        self.llm, self.store, self.max_loss = llm, store, max_loss
        self.report, self.tell = report, tell
        self.search, self.held_out = _divide(cases)
        # Every round runs in the shapes of the first, so that a family is compiled once.
        first = min(map(len, _groups(_share(self.search, ROUND_SHARES[0]))))
        self.shapes = batch_shapes(llm, cases, batch_size or first)
        needed = 3 * 100 / max_loss
        if len(self.held_out) < needed:
            raise InputError(
                f"{len(self.held_out)} prompts are left to confirm a loss under {max_loss} points; even without any "
                f"loss that takes {needed:.0f}: give more --samples or --lengths, or allow a greater --max-loss"
            )

    def run(self) -> Calibration:
        """Search, then confirm."""
        left_out = self._hopeless_tasks()
        self.search, self.held_out = (
            [case for case in part if case.task not in left_out] for part in (self.search, self.held_out)
        )
        tasks = tuple(dict.fromkeys(case.task for case in self.search))
        if not tasks:
            raise InputError("the dense model does none of the tasks; calibrate on shorter prompts")
        found = self._search()
        tested = []
        for config in _final_sequence(found, self.max_loss):
            tested.append(self._measure(config, self.held_out, "confirming"))
            if tested[-1].limit >= self.max_loss:
                break
        passed = [measured for measured in tested if measured.limit < self.max_loss]
        return Calibration(passed[-1] if passed else None, tuple(tested), tasks, left_out)

    def _hopeless_tasks(self) -> dict[str, float]:
        self._answer(NAMED[DENSE], self.search, "dense")
        scores = defaultdict(list)
        for case in self.search:
            answer = self.store.get(DENSE, case)
            assert answer is not None
            scores[case.task].append(answer.score)
        means = {task: float(np.mean(of_task)) for task, of_task in scores.items()}
        return {task: mean for task, mean in means.items() if not is_able(task, mean)}

    def _search(self) -> list[Measured]:
        """Every setting measured in the last round, on all prompts of the search."""
        families = list(first_families())
        found: list[Measured] = []
        for number, share in enumerate(ROUND_SHARES):
            prompts = _share(self.search, share)
            found, best = [], {}
            for family in families:
                ladder = list(self._ladder(family, prompts, f"round {number + 1} of {len(ROUND_SHARES)}"))
                found += ladder
                passing = [measured.flop_fraction for measured in ladder if measured.loss <= self.max_loss]
                best[family] = min(passing, default=1.0)
            if number < len(SURVIVORS):
                survivors = sorted(families, key=lambda family: best[family])[: SURVIVORS[number]]
                families = survivors if number else list(dict.fromkeys(self._variations(survivors)))
        return found

    def _ladder(self, family: UniPrefillConfig, prompts: Sequence[Case], stage: str) -> Iterator[Measured]:
        for top_p in TOP_PS:
            measured = self._measure(replace(family, top_p=top_p), prompts, stage)
            yield measured
            if measured.loss > self.max_loss + CLEARLY:
                return

    def _variations(self, survivors: Iterable[UniPrefillConfig]) -> Iterator[UniPrefillConfig]:
        """Each survivor, and with one thing changed at a time: drop layers, block, window rows or meaning."""
        model = self.llm.config
        layers = resolve_drop_layers(UniPrefillConfig(), model)
        choices = dict.fromkeys(kept for kept in (layers[1:], layers[::2], layers[: -(-len(layers) // 2)]) if kept)
        for family in survivors:
            yield family
            yield from (replace(family, drop_layers=kept) for kept in choices if kept != layers)
            yield from (replace(family, block_size=size) for size in (32, 128))
            yield replace(family, block_size=16, most_blocks=MOST_BLOCKS)
            yield replace(family, window_tokens=32)
            if any(layer.window is not None for layer in model.layers):
                yield replace(family, sliding_window="kept")

    def _measure(self, config: UniPrefillConfig, prompts: Sequence[Case], stage: str) -> Measured:
        self._answer(NAMED[DENSE], prompts, stage)
        name = self._answer(config, prompts, stage)
        losses, flops = defaultdict(list), []
        for case in prompts:
            own, dense = self.store.get(name, case), self.store.get(DENSE, case)
            assert own is not None and dense is not None
            losses[case.length, case.task].append(dense.score - own.score)
            flops.append(own.flop_fraction)
        groups = [np.asarray(group) for group in losses.values()]
        mean = paired_interval(groups).mean
        measured = Measured(config, mean, loss_limit(groups), float(np.mean(flops)), len(prompts))
        self.tell(measured)
        return measured

    def _answer(self, config: UniPrefillConfig, prompts: Sequence[Case], stage: str) -> str:
        """Answers of a setting, whose name in the store says what it is."""
        name = DENSE if config.is_dense else describe(config)
        setting = Setting(name, config)
        self.store.define([setting])
        run_cases(self.llm, prompts, [setting], self.store, self.shapes, lambda progress: self.report(stage, progress))
        return name


def first_families() -> Iterator[UniPrefillConfig]:
    """Ways to score, in both modes."""
    for score, memory, over in _SCORES:
        for dropped in ("discard", "carry"):
            yield UniPrefillConfig(score=score, score_memory=memory, top_p_over=over, dropped_tokens=dropped)  # pyright: ignore[reportArgumentType]


def describe(config: UniPrefillConfig) -> str:
    """A setting by the fields in which it differs from the defaults, as `--config` takes it."""
    definition, plain = config.definition, UniPrefillConfig().definition
    changed: dict[str, Any] = {name: value for name, value in definition.items() if value != plain[name]}
    if isinstance(changed.get("drop_layers"), list):
        changed["drop_layers"] = "+".join(map(str, changed["drop_layers"])) or "none"
    return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


def _final_sequence(found: Sequence[Measured], max_loss: float) -> list[UniPrefillConfig]:
    """Settings on the search's frontier, the safest first: each has fewer operations than all before it."""
    passing = sorted(
        (measured for measured in found if measured.loss <= max_loss), key=lambda measured: measured.flop_fraction
    )
    frontier: list[Measured] = []
    for measured in passing:
        # A setting with more operations is of use only if it looked safer.
        if not frontier or measured.limit < frontier[-1].limit:
            frontier.append(measured)
    chosen = frontier[:TESTED]
    return [measured.config for measured in reversed(chosen)]


def _divide(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """The prompts of the search and those held out; the first ones of every length and task are the search's."""
    search, held_out = [], []
    for group in _groups(cases):
        cut = max(1, round(SEARCH_SHARE * len(group)))
        search += group[:cut]
        held_out += group[cut:]
    return search, held_out


def _share(cases: Sequence[Case], share: float) -> list[Case]:
    """The first part of every length's and task's prompts."""
    return [case for group in _groups(cases) for case in group[: max(1, round(share * len(group)))]]


def _groups(cases: Sequence[Case]) -> list[list[Case]]:
    groups: dict[tuple[int, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.length, case.task].append(case)
    return list(groups.values())


CONFIDENCE_TEXT = f"{CONFIDENCE:.0%}, one-sided"
