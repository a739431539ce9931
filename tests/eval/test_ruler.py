"""Prompts and scores of RULER against the package's own scripts."""

import gzip
import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import uniprefill_jax as up
from tests.conftest import REPOSITORY
from uniprefill_jax.eval import prepare as preparing
from uniprefill_jax.eval.cases import string_score
from uniprefill_jax.eval.ruler import TASKS, find_files, load_samples, read_samples, split_answer_prefix
from uniprefill_jax.tokenizer import Tokenizer

with_package = pytest.mark.skipif(find_spec("long_context_eval") is None, reason="`make test` installs RULER's package")
# One task of every generator but the slowest; `qa_2` has no prompt of 1,024 tokens.
GENERATED = ("vt", "cwe", "fwe", "qa_1", "qa_2")
SAMPLES, SEED = 3, 7


def run_package(script: str, *arguments: str) -> None:
    """One of the package's scripts, which must succeed."""
    command = [sys.executable, "-m", "tests.eval.packaged", script, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    """Files made by `prepare`, and what it called impossible."""
    folder = tmp_path_factory.mktemp("ruler")
    preparing.prepare("smollm2-135m", folder, GENERATED[:1], (2048,), SAMPLES, SEED)
    return folder, preparing.prepare("smollm2-135m", folder, GENERATED, (1024,), SAMPLES, SEED)


@with_package
@pytest.mark.parametrize("task", ["vt"])
def test_prompts_are_those_of_the_package_for_the_same_seed(task: str, generated, tokenizer, tmp_path: Path):
    compare_with_package(generated[0], task, tokenizer, tmp_path)


@with_package
@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in TASKS if task != "vt"])
def test_prompts_of_every_task_are_those_of_the_package(task: str, tokenizer, tmp_path: Path):
    preparing.prepare("smollm2-135m", tmp_path / "ours", [task], (2048,), SAMPLES, SEED)
    # Some of HotpotQA's questions do not fit; the package would try them for ever.
    if task != "qa_2":
        compare_with_package(tmp_path / "ours", task, tokenizer, tmp_path)


def compare_with_package(folder: Path, task: str, tokenizer: Tokenizer, scratch: Path) -> None:
    """What the package's own script writes for the seed is what lies in the folder."""
    import yaml
    from long_context_eval.data.synthetic.constants import TASKS as PACKAGED

    synthetic = Path(find_spec("long_context_eval").submodule_search_locations[0]) / "synthetic.yaml"  # type: ignore
    described = yaml.safe_load(synthetic.read_text())[task]
    base = PACKAGED[described["task"]]
    tokenizer.save(scratch)
    options = {
        "save_dir": scratch,
        "save_name": task,
        "tokenizer_path": scratch,
        "tokenizer_type": "hf",
        "max_seq_length": 2048,
        "tokens_to_generate": base["tokens_to_generate"],
        "num_samples": SAMPLES,
        "random_seed": SEED,
        "template": base["template"] + base["answer_prefix"],
    } | described["args"]
    run_package(f"data/synthetic/{described['task']}.py", *(f"--{name}={value}" for name, value in options.items()))
    expected = (scratch / task / "validation.jsonl").read_text()
    assert (folder / "2048" / task / "validation.jsonl").read_text() == expected


@with_package
def test_short_prompts_where_the_package_goes_on_for_ever(generated, tokenizer):
    folder, impossible = generated
    assert impossible == [(1024, "qa_2")]
    for task in GENERATED[:-1]:
        samples = read_samples(folder / "1024" / task / "validation.jsonl", task, 1024)
        assert len(samples) == SAMPLES
        for sample in samples:
            # The coded words of fwe are counted without those to generate.
            room = 1024 if task == "fwe" else 1024 - TASKS[task].max_tokens
            assert room / 2 < len(sample.prompt(tokenizer, chat=False)) <= room
            assert sample.answer_prefix.startswith(TASKS[task].answer_prefix) and sample.references
    # What is there is not made again.
    assert preparing.prepare("smollm2-135m", folder, GENERATED, (1024,), SAMPLES, SEED) == impossible


@with_package
def test_every_task_is_known_with_its_metric():
    from uniprefill_jax.eval.packaged_ruler import tasks_of_package

    described = tasks_of_package(Path(find_spec("long_context_eval").submodule_search_locations[0]) / "data/synthetic")  # type: ignore
    assert list(described) == list(TASKS)
    for name, task in TASKS.items():
        assert described[name]["tokens_to_generate"] == task.max_tokens
        assert described[name]["answer_prefix"].startswith(task.answer_prefix)
        assert (described[name]["task"] == "qa") == (task.metric == "any")


@with_package
def test_scores_are_those_of_the_packages_evaluate(tmp_path: Path):
    """200 answers of all kinds: whole, partial, in other cases, with control characters, empty."""
    draw, expected = random.Random(5), {}
    for task, count in (("niah_single_2", 50), ("niah_multiquery", 50), ("vt", 30), ("cwe", 30), ("qa_1", 40)):
        lines, scores = [], []
        for index in range(count):
            references = [draw.choice(["Alpha", "1234567", "blue-Whale", "x y"]) + str(draw.randrange(9)) for _ in "ab"]
            pieces = [draw.choice([reference, reference.upper(), "nothing", ""]) for reference in references]
            answer = draw.choice([" ", "\n", "\x07", "\t", "\x0b "]).join(["", *pieces, ""])
            answer = draw.choice([answer, answer.replace(" ", "\x01"), f"\x00{answer}\x1f"])
            entry = {"index": index, "input": "?", "outputs": references, "pred": answer, "others": {}}
            lines.append(json.dumps(entry))
            scores.append(string_score(answer, references, TASKS[task].metric))
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
        expected[task] = scores
    run_package("eval/evaluate.py", f"--data_dir={tmp_path}", "--benchmark=synthetic")
    assert json.loads((tmp_path / "per_sample_scores.json").read_text()) == expected
    assert sum(map(len, expected.values())) == 200 and {0.0, 50.0, 100.0} <= {x for xs in expected.values() for x in xs}


def test_the_answer_prefix_follows_the_assistants_header(tokenizer, tmp_path: Path):
    text = "Answer the question.\n\nDocument 1:\nQ Answer: no.\n\nQuestion: Who? Answer:"
    assert split_answer_prefix("qa_1", text) == (text.removesuffix(" Answer:"), " Answer:")
    question, prefix = split_answer_prefix("niah_single_1", "Text. The special magic number is x.\nWhat is it?")
    assert prefix == "" and question.endswith("it?")
    place = tmp_path / "some-model" / "synthetic" / "2048" / "data" / "qa_1" / "validation.jsonl.gz"
    place.parent.mkdir(parents=True)
    with gzip.open(place, "wt") as stream:
        stream.write(json.dumps({"index": 0, "input": text, "outputs": ["Rollo"], "length": 9}) + "\n")
    (sample,) = load_samples(tmp_path, ["qa_1"], None, None)
    prompt = tokenizer.decode(sample.prompt(tokenizer, chat=True), skip_special_tokens=False)
    assert prompt.endswith("Question: Who?<|im_end|>\n<|im_start|>assistant\n Answer:")
    assert tokenizer.decode(sample.prompt(tokenizer, chat=False)) == text


def test_what_is_wrong_with_a_folder(tmp_path: Path):
    with pytest.raises(up.InputError, match="holds no validation.jsonl"):
        find_files(tmp_path)
    path = tmp_path / "vt" / "validation.jsonl"
    path.parent.mkdir()
    path.write_text('{"index": 0, "input": "x"}\n')
    with pytest.raises(up.InputError, match="no folder above it is named by a length"):
        find_files(tmp_path / "vt")
    with pytest.raises(up.InputError, match="line 1: no RULER sample"):
        read_samples(path, "vt", 1024)
    with pytest.raises(up.InputError, match="has 1 samples, --samples asks for 2"):
        read_samples(path, "vt", 1024, 2)
