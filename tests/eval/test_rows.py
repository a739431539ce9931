"""Which tasks a model does at all, and the average over those."""

from io import StringIO
from typing import Any

from rich.console import Console

from uniprefill_jax.eval.rows import ABLE_AVERAGE, AVERAGE, is_able, result_rows
from uniprefill_jax.eval.settings import parse_settings
from uniprefill_jax.eval.store import Answer
from uniprefill_jax.eval.table import print_tables

SETTINGS = parse_settings(["default"])
# Scores of dense and of the default by task.
SCORES = {"niah_single_1": (90.0, 60.0), "vt": (50.0, 40.0), "cwe": (4.0, 4.0), "few_shot": (30.0, 30.0)}


def answer(setting: int, task: str, index: int) -> Answer:
    return Answer(
        length=1024,
        task=task,
        index=index,
        setting=SETTINGS[setting].name,
        prompt="",
        prediction="",
        metric="all",
        score=SCORES[task][setting],
        kept=(100, 80),
        flop_fraction=(1.0, 0.8)[setting],
        prefill_ms=1.0,
    )


def rows_of(tasks: list[str]) -> list[dict[str, Any]]:
    answers = [answer(setting, task, index) for setting in (0, 1) for task in tasks for index in range(4)]
    return result_rows(answers, SETTINGS, {"model": "made-up"})


def test_chance_and_weak_scores_are_not_ability():
    assert is_able("vt", 10.0) and not is_able("vt", 9.9)
    assert is_able("few_shot", 35.0) and not is_able("few_shot", 34.9)


def test_second_average_is_over_able_tasks():
    rows = {row["task"]: row for row in rows_of(list(SCORES)) if row["config"] == "default"}
    assert {task: row["able"] for task, row in rows.items() if "able" in row} == {
        "niah_single_1": True,
        "vt": True,
        "cwe": False,
        "few_shot": False,
    }
    assert (rows[ABLE_AVERAGE]["dense_score"], rows[ABLE_AVERAGE]["diff"]) == (70.0, -20.0)
    assert (rows[AVERAGE]["dense_score"], rows[AVERAGE]["diff"]) == (43.5, -10.0)


def test_no_second_average_where_it_would_be_the_first_or_one_task():
    for tasks in (["niah_single_1", "vt"], ["niah_single_1", "cwe"], ["cwe", "few_shot"]):
        assert ABLE_AVERAGE not in {row["task"] for row in rows_of(tasks)}


def test_table_marks_tasks_that_the_model_does_not_do():
    print_tables(console := Console(record=True, width=150, file=StringIO()), rows_of(list(SCORES)))
    shown = console.export_text()
    assert "cwe (not able)" in shown and "few_shot (not able)" in shown and shown.count("not able") == 2
