"""Whole runs on the packaged SmolLM2-135M with short prompts: resumed, refused, told in tables and files."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import uniprefill_jax as up
from uniprefill_jax.cli import main
from uniprefill_jax.eval.cases import Case
from uniprefill_jax.eval.rows import result_rows
from uniprefill_jax.eval.runner import batch_shapes, run_cases
from uniprefill_jax.eval.settings import parse_setting, parse_settings
from uniprefill_jax.eval.store import AnswerStore, read_answers
from uniprefill_jax.eval.table import print_summary, print_tables
from uniprefill_jax.llm import LLM

COMMON = {"model": "tiny", "dtype": "float32"}
TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
SETTINGS = parse_settings(["top_p=0.5,drop_layers=1,block_size=16,sink_tokens=16,window_tokens=16"])


class Killed(Exception):
    """Stands for the signal that ends a run."""


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM.from_config(TINY, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Losses of given tokens, which need no tokenizer: two tasks of five samples."""
    return [
        Case(task, 256, index, tuple((7 * index + 3 * at) % 96 for at in range(200 + index)), (), "loss", 1, (5, 6, 7))
        for task in ("first", "second")
        for index in range(5)
    ]


def run(llm: LLM, cases: list[Case], path: Path, kill_after: int | None = None) -> list[dict]:
    """Rows of a run that may be killed after so many batches."""
    batches = 0

    def count(progress: object) -> None:
        nonlocal batches
        batches += 1
        if batches == kill_after:
            raise Killed

    store = AnswerStore(path, COMMON, SETTINGS)
    run_cases(llm, cases, SETTINGS, store, batch_shapes(llm, cases, 2), count)
    rows = result_rows(store.answers.values(), SETTINGS, COMMON)
    return [{name: value for name, value in row.items() if "ms" not in name and "ttft" not in name} for row in rows]


def test_a_killed_run_resumes_to_the_same_result(tiny: LLM, cases: list[Case], tmp_path: Path):
    whole = run(tiny, cases, tmp_path / "whole.jsonl")
    path = tmp_path / "killed.jsonl"
    with pytest.raises(Killed):
        run(tiny, cases, path, kill_after=4)
    before = path.read_bytes()
    path.write_bytes(before[:-40])  # the last line was being written
    assert run(tiny, cases, path) == whole
    assert path.read_text().count('"answers"') == 10  # the tasks share batches
    assert len(whole) == 4 and {row["task"] for row in whole} == {"first", "second"}  # losses have no average
    dropping = [row for row in whole if row["method"] == "uniprefill"]
    assert all(row["diff"] != 0 and row["kept"][0] < 1 and row["samples"] == 5 for row in dropping)


def test_another_run_is_not_mixed_in(tiny: LLM, cases: list[Case], tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    run(tiny, cases[:2], path)
    with pytest.raises(up.InputError, match="made with dtype 'float32', now it is 'bfloat16'"):
        AnswerStore(path, COMMON | {"dtype": "bfloat16"}, SETTINGS)
    (dense, setting) = SETTINGS
    changed = type(setting)(setting.name, up.UniPrefillConfig(top_p=0.7))
    with pytest.raises(up.InputError, match="another setting named"):
        AnswerStore(path, COMMON, [dense, changed])
    other = [Case(**vars(case) | {"prompt": case.prompt[1:]}) for case in cases[:2]]
    with pytest.raises(up.InputError, match="answers another prompt as sample 0 of first"):
        run(tiny, other, path)
    (tmp_path / "text.jsonl").write_text("no answers\n")
    with pytest.raises(up.InputError, match="not a file of answers"):
        AnswerStore(tmp_path / "text.jsonl", COMMON, SETTINGS)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("default", {}),
        ("carry,top_p=0.9", {"dropped_tokens": "carry", "top_p": 0.9}),
        ("score=peak, score_memory=0.5", {"score": "peak", "score_memory": 0.5}),
        ("drop_layers=7+11,window_tokens=32", {"drop_layers": (7, 11), "window_tokens": 32}),
        ("authors", {"sliding_window": "kept"}),
    ],
)
def test_settings_as_users_write_them(text: str, fields: dict):
    dense, setting = parse_settings([text])
    assert dense.config.is_dense and setting.config == up.UniPrefillConfig(**fields) and setting.name == text


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["unknown"], "neither one of dense, default"),
        (["top_q=0.9"], "fields are top_p"),
        (["top_p=high"], "use a number"),
        (["top_p=2"], "top_p is 2.0"),
        (["drop_layers=7,11"], "'11' is neither"),
        (["drop_layers=a"], 'use "auto"'),
        (["carry", "carry"], "given twice"),
    ],
)
def test_settings_that_are_none(texts: list[str], message: str):
    with pytest.raises(up.UniPrefillError, match=message):
        parse_settings(texts)


def test_methods_are_settings_that_a_file_of_answers_knows(tmp_path: Path):
    texts = ["dense", "uniprefill:top_p=0.9+snapkv:capacity=64", "xattention:threshold=0.8"]
    settings = parse_settings(["carry"], methods=texts)
    assert [setting.name for setting in settings] == ["dense", "carry", *texts[1:]]
    assert [setting.method for setting in settings] == ["dense", "uniprefill", "uniprefill+snapkv", "xattention"]
    AnswerStore(tmp_path / "answers.jsonl", COMMON, settings)
    _, found, _ = read_answers(tmp_path / "answers.jsonl")
    assert [(own.name, up.Method.of(own.config).definition) for own in found[1:]] == [
        (own.name, up.Method.of(own.config).definition) for own in settings[1:]
    ]
    with pytest.raises(up.InputError, match="given twice"):
        parse_settings(["carry"], methods=["snapkv", "snapkv"])
    with pytest.raises(up.InputError, match="use some of dense, uniprefill, minference"):
        parse_settings([], methods=["quest"])


def test_file_older_than_a_field_goes_on_unless_the_setting_differs(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    growing = parse_setting("most_blocks=8")
    AnswerStore(path, COMMON, [*SETTINGS, growing])
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    for entry in entries[1:]:
        del entry["definition"]["most_blocks"]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    AnswerStore(path, COMMON, SETTINGS)
    with pytest.raises(up.InputError, match="another setting named 'most_blocks=8'"):
        AnswerStore(path, COMMON, [growing])


def test_methods_answer_cases(tiny: LLM, cases: list[Case], tmp_path: Path):
    """A method that changes decoding alone changes the losses of what follows, and takes all operations of dense."""
    settings = parse_settings([], methods=["streaming_llm:sinks=2:recent=16"])
    store = AnswerStore(tmp_path / "answers.jsonl", COMMON, settings)
    run_cases(tiny, cases[:2], settings, store, batch_shapes(tiny, cases[:2], 2))
    dense, row = result_rows(store.answers.values(), settings, COMMON)
    assert row["method"] == "streaming_llm" and row["diff"] != 0 and row["flop_fraction"] == 1.0
    print_summary(console := Console(record=True, width=150), [dense, row])
    assert console.export_text() == "", "losses have no average"
    both = [own | {"metric": "all", "length": length} for own in (dense, row) for length in (256, 512)]
    print_summary(console, both)
    shown = console.export_text()
    assert "256, x" in shown and shown.count("streaming_llm") == 1
    print_summary(console, both + [own | {"model": "other", "score": 77.77} for own in both])
    tables = console.export_text().split("score by length")
    assert [table.count("77.77") for table in tables] == [0, 0, 6], "one table per model"
    print_tables(console, both + [own | {"model": "other"} for own in both])
    assert re.findall(r"(\w+), (\d+) tokens: score", console.export_text()) == [
        (model, length) for model in (COMMON["model"], "other") for length in ("256", "512")
    ]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two small tasks in RULER's format, written here: a needle and a question."""
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 9
    for task, rest, references in (
        (
            "niah_single_1",
            "One of the special magic numbers for tall-fern is: 4817263. {noise}\nWhat is the special magic number for "
            "tall-fern mentioned in the provided text? The special magic number for tall-fern mentioned in the "
            "provided text is",
            ["4817263"],
        ),
        ("qa_1", "{noise}\n\nQuestion: What colour is the grass? Answer:", ["green", "Green"]),
    ):
        place = tmp_path / "512" / task / "validation.jsonl"
        place.parent.mkdir(parents=True)
        entry = {"index": 0, "input": noise + rest.format(noise=noise), "outputs": references, "length": 500}
        place.write_text(json.dumps(entry) + "\n")
    return tmp_path


def test_ruler_from_files_end_to_end(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def command(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as exit_information:
            main(["eval", *arguments])
        captured = capsys.readouterr()
        assert exit_information.value.code == code, captured.err
        return captured.out if code == 0 else captured.err

    data = ("smollm2-135m", "--data", str(prompts))
    shown = command("ruler", *data, "--print-prompt")
    assert shown.count("<|im_start|>assistant\n The special magic number") == 1 and "[... " in shown
    result, answers = tmp_path / "result.json", tmp_path / "answers.jsonl"
    run = ("ruler", *data, "--config", "top_p=0.6", "--answers", str(answers), "--json", str(result))
    table = command(*run)
    assert "512 tokens" in table and "average" in table
    rows = json.loads(result.read_text())["rows"]
    wanted = "model task length method config samples score dense_score diff ci_low ci_high kept flop_fraction"
    assert all(set(wanted.split()) <= row.keys() for row in rows) and len(rows) == 6
    by_place = {(row["config"], row["task"]): row for row in rows}
    assert by_place["dense", "niah_single_1"]["score"] == by_place["dense", "qa_1"]["score"] == 100.0
    assert by_place["dense", "average"]["flop_fraction"] == 1.0 > by_place["top_p=0.6", "average"]["flop_fraction"]
    assert all(row["prefill_ms"] > 0 and "chat template" in row["harness"] for row in rows)
    # Everything is there already; and the table can be made without the model.
    again = command(*run)
    assert again == table and answers.read_text().count('"answers"') == 4
    told = tmp_path / "told.json"
    assert command("table", str(answers), "--json", str(told)) == table
    assert [row["score"] for row in json.loads(told.read_text())["rows"]] == [row["score"] for row in rows]
    untimed = command("table", str(answers), "--json", str(told), "--no-times")
    assert "FLOPs of dense" in untimed and "prefill" in table and "prefill" not in untimed
    assert {"ttft_ratio", "prefill_ms", "dense_prefill_ms"}.isdisjoint(json.loads(told.read_text())["rows"][0])
    assert "has none of vt" in command("ruler", *data, "--tasks", "vt", "--lengths", "512", code=2)
