"""`uniprefill bench report`: the numbers of the result files, what was left out, and no need of the network."""

import json
from pathlib import Path

import pytest

from tests.pages.parsed import Page
from uniprefill_jax.bench.frontier import family, frontier, points_of
from uniprefill_jax.bench.report import build_report, format_value
from uniprefill_jax.cli import main
from uniprefill_jax.errors import InputError

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(build_report(RESULTS)[0])


def test_numbers_are_those_of_the_files(page: Page):
    page.assert_needs_nothing_else()
    rows = json.loads((RESULTS / "ttft_h200_llama.json").read_text())["rows"]
    (table,) = (table for table in page.all("table") if table.attributes.get("data-file") == "ttft_h200_llama.json")
    inside = [element for element in page.elements if table in element.parents]
    headings = [element.text for element in inside if element.tag == "th"]
    cells = [element.text for element in inside if element.tag == "td"]
    assert len(cells) == len(headings) * len(rows)
    for number, row in enumerate(rows):
        shown = dict(zip(headings, cells[number * len(headings) :], strict=False))
        assert {name: text for name, text in shown.items() if text} == {
            name: format_value(value) for name, value in row.items() if value is not None
        }


def test_every_result_file_of_the_repository_is_shown(page: Page):
    assert build_report(RESULTS)[1] == []
    files = {table.attributes["data-file"] for table in page.all("table") if "data-file" in table.attributes}
    assert files == {path.name for path in RESULTS.glob("*.json")}


def test_every_figure_says_where_it_is_from(page: Page):
    figures = page.all("figure")
    assert len(figures) >= 4 and page.all("svg")
    for figure in figures:
        (caption,) = (part for part in page.all("figcaption") if figure in part.parents)
        name = next(path.name for path in RESULTS.glob("*.json") if path.name in caption.text)
        content = json.loads((RESULTS / name).read_text())
        for part in (content["command"], content["device"], content["date"], content["versions"]["jax"]):
            assert part in caption.text


def test_what_cannot_be_shown_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = {"arch": "<script>alert(1)</script>", "n": 8, "batch": 1, "method": "dense", "ttft_ms": 1.5}
    content = {"command": "c", "date": "d", "device": "e", "versions": {"jax": "1"}, "rows": [row, {"mass": 3}]}
    (tmp_path / "good.json").write_text(json.dumps(content))
    (tmp_path / "broken.json").write_text("{")
    html = tmp_path / "report.html"
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "report", str(tmp_path), "--html", str(html)])
    error = capsys.readouterr().err
    assert "not shown: broken.json: it is not JSON" in error and "not shown: good.json: 1 row is of no known" in error
    page = Page(html.read_text())
    page.assert_needs_nothing_else()
    assert "broken.json" in page.by_id("not-shown").text
    assert "<script>alert(1)</script>" in page.by_id("not-shown").parents[-1].text and not page.all("script")


def test_steps_of_a_profile_are_plotted_by_method(tmp_path: Path):
    labels = {"arch": "a", "n": 8, "batch": 1, "dtype": "float32"}
    rows = [
        labels | {"method": method, "step": step, "ms": ms}
        for method, times in {"dense": {"qkv": 3.5}, "top_p=0.5": {"qkv": 2.25, "score": 0.5}}.items()
        for step, ms in times.items()
    ]
    content = {"command": "c", "date": "d", "device": "e", "versions": {"jax": "1"}, "rows": rows}
    (tmp_path / "profile.json").write_text(json.dumps(content))
    html, unreadable = build_report(tmp_path)
    drawn = " ".join(element.text for element in Page(html).all("svg"))
    assert unreadable == [] and all(text in drawn for text in ("top_p=0.5", "qkv", "score", "3.5", "2.25", "0.5"))


def test_settings_that_differ_in_top_p_share_a_line(tmp_path: Path):
    head = {"model": "m", "length": 1024, "method": "uniprefill", "dense_score": 80.0, "diff": -1.0, "samples": 9}
    rows = [
        head | {"task": task, "config": config, "score": score, "flop_fraction": fraction}
        for task in ("vt", "average")
        for config, score, fraction in (
            ("dense", 80.0, 1.0),
            ("top_p=0.9", 60.0, 0.7),
            ("top_p=0.99", 75.0, 0.9),
            ("score=peak,top_p=0.9", 79.0, 0.5),
        )
    ]
    searched = {"config": "carry", "loss": 0.1, "loss_limit": 0.4, "flop_fraction": 0.6, "prompts": 600}
    for name, own in (("ruler.json", rows), ("calibration.json", [searched])):
        content = {"command": "c", "date": "d", "device": "e", "versions": {"jax": "1"}, "rows": own}
        (tmp_path / name).write_text(json.dumps(content))
    html, unreadable = build_report(tmp_path)
    page = Page(html)
    assert not unreadable and len(page.all("figure")) == 2
    (svg,) = page.all("svg")
    texts = [element.text.strip() for element in page.all("text") if svg in element.parents]
    assert [text for text in texts if text in ("dense", "default", "score=peak")] == ["dense", "default", "score=peak"]
    assert "Score against operations: average" in texts and "100%" in texts


def test_a_folder_without_results_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="holds no .json file"):
        build_report(tmp_path)
    (tmp_path / "broken.json").write_text("[]")
    with pytest.raises(InputError, match="it holds a list"):
        build_report(tmp_path)


def accuracy_file(folder: Path, model: str, scores: dict[str, dict[int, tuple[float, float]]]) -> None:
    """A file of one model's averages: by setting and length, operations and score."""
    rows = [
        {"model": model, "task": "average", "length": length, "config": config, "harness": "h", "method": "m"}
        | {"score": score, "dense_score": 90.0, "flop_fraction": fraction}
        for config, lengths in scores.items()
        for length, (fraction, score) in lengths.items()
    ]
    content = {"command": f"c {model}", "date": "d", "device": "e", "versions": {"jax": "1"}, "rows": rows}
    (folder / f"{model}.json").write_text(json.dumps(content))


SCORES = {
    "dense": {1024: (1.0, 90.0), 2048: (1.0, 80.0)},
    "top_p=0.9": {1024: (0.8, 80.0), 2048: (0.6, 70.0)},
    "carry": {1024: (0.95, 70.0), 2048: (0.85, 60.0)},
    "carry,top_p=0.5": {1024: (0.5, 50.0), 2048: (0.5, 40.0)},
    "top_p=0.6": {1024: (0.6, 88.0)},
}


def test_models_of_several_files_stand_side_by_side(tmp_path: Path):
    accuracy_file(tmp_path, "first", SCORES)
    assert "by model" not in build_report(tmp_path)[0]
    accuracy_file(tmp_path, "second", SCORES)
    accuracy_file(tmp_path, "dense-only", {"dense": SCORES["dense"]})
    page = Page(build_report(tmp_path)[0])
    (heading,) = (element for element in page.all("h2") if "by model" in element.text)
    caption = next(part.text for part in page.all("figcaption") if "dashed" in part.text)
    assert "c first" in caption and "c second" in caption
    drawn = " ".join(element.text for element in page.all("svg"))
    assert "first: 1,024, 2,048 tokens (first.json)" in drawn and "frontier" in drawn
    assert "dense-only: 1,024" not in drawn


def test_frontier_is_what_no_other_setting_beats():
    rows = [
        {"config": config, "length": length, "flop_fraction": fraction, "score": score}
        for config, lengths in SCORES.items()
        for length, (fraction, score) in lengths.items()
    ]
    points = points_of(rows)
    assert {point.config: (point.flop_fraction, point.score) for point in points} == {
        "dense": (1.0, 85.0),
        "top_p=0.9": (pytest.approx(0.7), 75.0),
        "carry": (pytest.approx(0.9), 65.0),
        "carry,top_p=0.5": (0.5, 45.0),
    }
    assert [point.config for point in frontier(points)] == ["carry,top_p=0.5", "top_p=0.9", "dense"]
    assert [family(point.config) for point in points] == ["dense", "default", "carry", "carry"]
