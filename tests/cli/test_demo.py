"""The demo: the prompt it builds, what it measures and in which order, and the map that it draws."""

import json
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from uniprefill_jax.cli import main
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.demo.comparison import compare
from uniprefill_jax.demo.display import kept_map, print_comparison, progress_steps
from uniprefill_jax.demo.document import FACT, QUESTION, SECRET, build_prompt
from uniprefill_jax.results import Completion, PrefillResult
from uniprefill_jax.tokenizer import load_tokenizer

CONFIG = UniPrefillConfig(top_p=0.8)


class WordTokenizer:
    """One id per whitespace-separated word; with or without a chat template that brackets the text."""

    def __init__(self, has_chat_template: bool):
        self.has_chat_template = has_chat_template
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[token_id] for token_id in ids)

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        (message,) = messages
        assert message["role"] == "user"
        return self.encode(f"<user> {message['content']} <assistant>")


@pytest.mark.parametrize("has_chat_template", [True, False])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_prompt_holds_the_fact_at_its_depth_and_ends_with_the_question(has_chat_template: bool, depth: float):
    tokenizer = WordTokenizer(has_chat_template)
    prompt = build_prompt(tokenizer, depth)  # pyright: ignore[reportArgumentType]
    text = tokenizer.decode(prompt.token_ids)
    assert text.count(SECRET) == 1 and text.count(FACT) == 1
    assert tokenizer.decode(prompt.token_ids[prompt.fact_position :]).startswith(FACT)
    assert prompt.fact_position / len(prompt.token_ids) == pytest.approx(depth, abs=0.06)
    assert text.endswith(f"{QUESTION} <assistant>" if has_chat_template else "is:")


def test_document_is_long_enough_for_the_packaged_model():
    from checkpoints_convert import open_checkpoint

    tokenizer = load_tokenizer(open_checkpoint("smollm2-135m"))
    assert tokenizer is not None
    prompt = build_prompt(tokenizer, 0.6)
    assert 3_500 <= len(prompt.token_ids) <= 4_000
    assert FACT in tokenizer.decode(prompt.token_ids[prompt.fact_position :][:40])


class FakeModel:
    """Stands in for an LLM: takes the time it is told and records the calls."""

    def __init__(self, answers: dict[bool, str]):
        self.answers = answers
        self.calls: list[str] = []

    def result(self, is_dense: bool, seconds: float) -> PrefillResult:
        return PrefillResult(
            logits=np.zeros(3, np.float32),
            kept_positions={} if is_dense else {1: np.arange(50, dtype=np.int32), 2: np.arange(25, dtype=np.int32)},
            block_mass={},
            cut_margin={},
            kv_lengths=np.zeros(3, np.int32),
            segment_of_layer=(0,),
            segment_lengths=(100,) if is_dense else (100, 50, 25),
            flop_fraction=1.0 if is_dense else 0.5,
            discarded_mass={},
            seconds=seconds,
            compile_seconds=7.0,
        )

    def generate(self, prompts, config, sampling):
        self.calls.append(f"generate {config.is_dense}")
        # A slow first run that the median passes over.
        prefill = self.result(config.is_dense, 99.0)
        return [Completion([1], self.answers[config.is_dense], "stop", prefill)]

    def prefill(self, prompts, config):
        self.calls.append(f"prefill {config.is_dense}")
        return [self.result(config.is_dense, 8.0 if config.is_dense else 5.0)]


@contextmanager
def no_step(label: str):
    yield


def run_fake(answers: dict[bool, str]):
    model = FakeModel(answers)
    comparison = compare(model, list(range(100)), CONFIG, runs=3, max_tokens=8, step=no_step)  # pyright: ignore[reportArgumentType]
    return model, comparison


def test_methods_are_timed_in_turns_after_compilation_and_the_median_counts():
    model, comparison = run_fake({True: f"It is {SECRET}.", False: f"{SECRET}"})
    assert model.calls == ["generate True", "generate False"] + ["prefill True", "prefill False"] * 2
    assert comparison.dense.time_to_first_token == 8.0
    assert comparison.speedup == pytest.approx(1.6)
    assert comparison.dense.is_right and comparison.uniprefill.is_right


def test_rows_have_the_documented_keys():
    _, comparison = run_fake({True: SECRET, False: "no idea"})
    dense, uniprefill = json.loads(json.dumps(comparison.rows("smollm2-135m", "float32")))
    keys = "arch n batch method kept ttft_ms dense_ttft_ms ideal_speedup speedup compile_s".split()
    assert set(keys) <= set(dense)
    assert (dense["method"], dense["speedup"], dense["answer_is_right"]) == ("dense", 1.0, True)
    assert (uniprefill["kept"], uniprefill["answer_is_right"]) == ([100, 50, 25], False)
    assert uniprefill["ideal_speedup"] == 2.0 and uniprefill["ttft_ms"] == 5000.0


def test_comparison_is_printed():
    _, comparison = run_fake({True: f"It is {SECRET}.", False: "no idea"})
    console = Console(file=StringIO(), width=120)
    with progress_steps(console)("Loading"):
        pass
    print_comparison(console, comparison, fact_position=50)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for shown in ("Loading", f"right: It is {SECRET}.", "wrong: no idea", "8.00 s", "5.00 s", "100 > 50 > 25", "50%"):
        assert shown in text
    for shown in ("2.00x", "1.60x", "7.0 s", "^ the fact"):
        assert shown in text
    map_line, marker_line = (line for line in text.splitlines() if "kept  |" in line or "^" in line)
    assert marker_line.index("^") - map_line.index("|") - 1 == pytest.approx(32, abs=1)


def test_map_is_darker_where_more_drops_were_survived():
    kept = {1: np.r_[0:50, 99], 2: np.r_[0:25]}
    assert kept_map(100, kept, cells=4) == "█▒ ░"
    assert kept_map(100, {}, cells=4) == "████"
    assert len(kept_map(10, kept | {1: np.arange(5), 2: np.arange(2)}, cells=64)) == 10


@pytest.mark.slow
def test_demo_on_real_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "demo.json"
    with pytest.raises(SystemExit) as exit_information:
        main(["demo", "--json", str(path)])
    assert exit_information.value.code == 0, capsys.readouterr().out
    dense, uniprefill = json.loads(path.read_text())["rows"]
    assert SECRET in dense["answer"] and SECRET in uniprefill["answer"]
    assert uniprefill["ttft_ms"] < dense["ttft_ms"]
