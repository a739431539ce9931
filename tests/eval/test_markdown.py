"""Tables of a document made from result files."""

import json
from pathlib import Path
from typing import Any

import pytest

import uniprefill_jax as up
from uniprefill_jax.cli import main
from uniprefill_jax.eval.markdown import fill_tables


def row(task: str, config: str, score: float, **changed: Any) -> dict[str, Any]:
    dense = config == "dense"
    made = {"model": "small", "length": 1024, "task": task, "config": config, "metric": "all", "score": score}
    made |= {"dense_score": 50.0, "diff": score - 50.0, "ci_low": score - 52.0, "ci_high": score - 48.0}
    return made | {"kept": [] if dense else [0.9, 0.75], "flop_fraction": 1.0 if dense else 0.8} | changed


RULER = [
    row("vt", "dense", 50.0),
    row("cwe", "dense", 3.0, dense_score=3.0),
    row("average of able tasks", "dense", 50.0),
    row("average", "dense", 26.5),
    row("average of able tasks", "carry", 46.0),
    row("average", "carry", 47.0),
    row("average", "top_p=0.9", 30.25, ci_low=None, ci_high=None),
    row("vt", "dense", 40.0, length=2048, dense_score=40.0),
]
PROBES = [
    row("few_shot", "dense", 30.0, dense_score=30.0),
    row("few_shot", "carry", 20.0, dense_score=30.0),
    row("prose_loss", "dense", 2.5, dense_score=2.5, metric="loss"),
    row("prose_loss", "carry", 2.5625, dense_score=2.5, diff=0.0625, ci_low=0.03, ci_high=0.1, metric="loss"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in (("ruler", RULER), ("probes", PROBES), ("empty", [])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    return tmp_path


def place(wanted: str, body: str = "") -> str:
    return f"before\n<!-- table: {wanted} -->\n{body}<!-- end of table -->\nafter\n"


def test_accuracy(folder: Path):
    assert fill_tables(place("accuracy ruler.json"), folder) == place(
        "accuracy ruler.json",
        "| model | tokens | setting | FLOPs of dense | kept after each drop | average | difference | difference, able "
        "tasks |\n"
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| small | 1,024 | dense | 1.00 |  | 26.5 |  |  |\n"
        "| small | 1,024 | carry | 0.80 | 0.90 0.75 | 47.0 | -3.0 (-5.0 to -1.0) | -4.0 (-6.0 to -2.0) |\n"
        "| small | 1,024 | `top_p=0.9` | 0.80 | 0.90 0.75 | 30.2 | -19.8 |  |\n"
        "| small | 2,048 | dense | 1.00 |  | 40.0 |  |  |\n",
    )


def test_tasks_that_the_model_does_not_do_are_in_brackets(folder: Path):
    filled = fill_tables(place("tasks ruler.json"), folder)
    assert "| task | small, 1,024 | small, 2,048 |\n" in filled
    assert "| vt | 50.0 | 40.0 |\n| cwe | (3.0) |  |\n<!--" in filled


def test_probes(folder: Path):
    filled = fill_tables(place("probes probes.json"), folder)
    assert "| model | tokens | probe | dense | carry |\n" in filled
    assert "| small | 1,024 | few_shot | (30.0) | -30.0 (-32.0 to -28.0) |\n" in filled
    assert "| small | 1,024 | prose_loss | 2.500 | +0.062 (+0.030 to +0.100) |\n" in filled


def test_every_place_is_made_anew_and_once_is_enough(folder: Path):
    text = place("tasks ruler.json", "| old |\n") + place("probes probes.json")
    once = fill_tables(text, folder)
    assert "old" not in once and once.count("before") == 2 and once.count("| task |") == once.count("| probe |") == 1
    assert fill_tables(once, folder) == once


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("scores ruler.json", "no table 'scores'"),
        ("tasks absent.json", "absent.json is no result file"),
        ("probes empty.json", "no rows for the probes table"),
    ],
)
def test_what_cannot_be_made_is_said(folder: Path, wanted: str, message: str):
    with pytest.raises(up.InputError, match=message):
        fill_tables(place(wanted), folder)


def test_command(folder: Path, capsys: pytest.CaptureFixture):
    document = folder / "page.md"
    document.write_text(place("tasks ruler.json"))
    with pytest.raises(SystemExit) as ended:
        main(["eval", "fill", str(document)])
    assert not ended.value.code and "| cwe | (3.0) |" in document.read_text()
    assert "tasks ruler.json" in capsys.readouterr().err
    document.write_text("no place")
    with pytest.raises(SystemExit) as ended:
        main(["eval", "fill", str(document)])
    assert ended.value.code and "has no place for a table" in capsys.readouterr().err
