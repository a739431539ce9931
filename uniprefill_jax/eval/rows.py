"""Rows of result files and tables from a run's answers: every setting beside dense on the same prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from uniprefill_jax.eval.paired import mcnemar, paired_interval
from uniprefill_jax.eval.settings import DENSE, Setting
from uniprefill_jax.eval.store import Answer

AVERAGE = "average"
ABLE_AVERAGE = "average of able tasks"
AVERAGES = (AVERAGE, ABLE_AVERAGE)
# What guessing scores, in points, where there is something to guess: one of four labels. Numbers and words of a text
# of thousands are not guessed.
CHANCE = {"few_shot": 25.0}
LEAST_OVER_CHANCE = 10.0  # points of the dense model under which a task says nothing about a loss
TIMES = ("prefill_ms", "dense_prefill_ms", "ttft_ratio")


def result_rows(answers: Iterable[Answer], settings: Sequence[Setting], labels: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per length, task and setting, and one per length and setting over its tasks, but for losses.

    `diff` is a setting's score minus dense's, in points, with its 95% interval; times are those of the same runs. Only
    prompts count that both have answered, so that a run cut short can be looked at. `able` says of a task whether the
    dense model does it at all (`is_able`); where it does some only, there is a second average over those.
    """
    table: dict[int, dict[str, dict[str, dict[int, Answer]]]] = {}
    for answer in answers:
        by_task = table.setdefault(answer.length, {}).setdefault(answer.setting, {})
        by_task.setdefault(answer.task, {})[answer.index] = answer
    rows = []
    for length, of_length in sorted(table.items()):
        for setting in settings:
            pairs = {}
            for task, own in of_length.get(setting.name, {}).items():
                dense = of_length.get(DENSE, {}).get(task, {})
                both = sorted(own.keys() & dense.keys())
                if both:
                    pairs[task] = [own[index] for index in both], [dense[index] for index in both]
            groups = {task: [pair] for task, pair in pairs.items()}
            points = {task: pair for task, pair in pairs.items() if pair[0][0].metric != "loss"}
            able = {task: is_able(task, float(scores(dense).mean())) for task, (_, dense) in points.items()}
            if 1 < sum(able.values()) < len(points):
                groups[ABLE_AVERAGE] = [pair for task, pair in points.items() if able[task]]
            if len(points) > 1:
                groups[AVERAGE] = list(points.values())
            for task, group in groups.items():
                head = labels | {"task": task, "length": length, "method": setting.method, "config": setting.name}
                row = head | _compare([own for own, _ in group], [dense for _, dense in group])
                rows.append(row | {"able": able[task]} if task in able else row)
    return rows


def is_able(task: str, dense_score: float) -> bool:
    """Whether a model that scores so when dense does the task at all, and not by chance."""
    return dense_score >= CHANCE.get(task, 0.0) + LEAST_OVER_CHANCE


def without_times(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of runs that shared their device with other work: what they took says nothing."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def scores(answers: Sequence[Answer]) -> np.ndarray:
    """Scores as an array."""
    return np.asarray([answer.score for answer in answers])


def _compare(own: list[list[Answer]], dense: list[list[Answer]]) -> dict[str, Any]:
    """What a row says of one task, or of several with the same weight each."""
    pairs = [(scores(ours), scores(theirs)) for ours, theirs in zip(own, dense, strict=True)]
    interval = paired_interval([ours - theirs for ours, theirs in pairs])
    every = [answer for answers in own for answer in answers]
    kept = np.asarray([np.divide(answer.kept[1:], answer.kept[0]) for answer in every])
    milliseconds, dense_milliseconds = (
        sum(answer.prefill_ms for answers in group for answer in answers) / len(every) for group in (own, dense)
    )
    return {
        "metric": every[0].metric if len(own) == 1 else AVERAGE,
        "samples": len(every),
        "score": round(float(np.mean([ours.mean() for ours, _ in pairs])), 4),
        "dense_score": round(float(np.mean([theirs.mean() for _, theirs in pairs])), 4),
        "diff": round(interval.mean, 4),
        "ci_low": None if interval.low is None else round(interval.low, 4),
        "ci_high": None if interval.high is None else round(interval.high, 4),
        "p_value": mcnemar(pairs[0][1], pairs[0][0]) if len(pairs) == 1 else None,
        "kept": [round(float(share), 4) for share in kept.mean(axis=0)] if kept.size else [],
        "flop_fraction": round(float(np.mean([answer.flop_fraction for answer in every])), 4),
        "prefill_ms": round(milliseconds, 3),
        "dense_prefill_ms": round(dense_milliseconds, 3),
        "ttft_ratio": round(milliseconds / dense_milliseconds, 4),
    }
