"""The search for a setting on a model whose losses are known, and the setting's way to the model's default."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console

import uniprefill_jax as up
from tests.parallel.models import write_checkpoint
from uniprefill_jax.calibrated import CalibratedSetting, calibrated_setting, setting_path, write_setting
from uniprefill_jax.cli import options
from uniprefill_jax.eval.calibration import Calibrator, describe
from uniprefill_jax.eval.cases import Case
from uniprefill_jax.eval.settings import parse_setting
from uniprefill_jax.eval.store import AnswerStore
from uniprefill_jax.models.config import read_model_config

MODEL = read_model_config(
    {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
)


class KnownModel:
    """Answers rightly but for a share of prompts that follows from the setting by a rule written down here."""

    config = MODEL

    def generate(self, prompts, config, sampling, *, continuations, shape) -> list[SimpleNamespace]:
        peak = config.score == "peak" and config.score_memory == 0.5 and config.dropped_tokens == "discard"
        safe_top_p = 0.7 if peak and config.window_tokens == 32 else 0.9 if peak else 0.99
        lost = 0.0 if config.is_dense or config.top_p >= safe_top_p else 0.2
        fraction = 1.0 if config.is_dense else config.top_p
        prefill = SimpleNamespace(segment_lengths=(10, 5), flop_fraction=fraction, seconds=0.1, compile_seconds=0.0)
        return [
            SimpleNamespace(
                text="wrong" if task == 1 or (sample % 100) < 100 * lost else "right",
                prefill=prefill,
                decode_seconds=0.0,
                decode_compile_seconds=0.0,
            )
            for task, sample in prompts
        ]


def cases(count: int) -> list[Case]:
    """Task "known" that the model can do, and "hopeless"."""
    draw = np.random.default_rng(0)
    return [
        Case(task, 512, index, (number, int(draw.integers(1000))), ("right",), "all", 4)
        for number, task in enumerate(("known", "hopeless"))
        for index in range(count)
    ]


def calibrate(count: int, max_loss: float):
    store = AnswerStore(None, {}, [])
    return Calibrator(KnownModel(), cases(count), store, max_loss).run()  # type: ignore[arg-type]


def test_the_known_best_setting_is_found_and_confirmed():
    result = calibrate(900, max_loss=1.0)
    assert result.chosen is not None
    best = up.UniPrefillConfig(
        score="peak", score_memory=0.5, top_p_over="candidates", window_tokens=32, top_p=0.7, drop_layers="auto"
    )
    assert result.chosen.config == best and result.chosen.flop_fraction == 0.7
    assert result.chosen.loss == 0.0 and result.chosen.limit < 1.0 and result.chosen.prompts == 600
    assert result.tasks == ("known",) and result.left_out == {"hopeless": 0.0}
    fractions = [measured.flop_fraction for measured in result.tested]
    assert fractions == sorted(fractions, reverse=True)


def test_blocks_that_grow_with_the_prompt_are_tried():
    told: list[up.UniPrefillConfig] = []
    Calibrator(
        KnownModel(), cases(450), AnswerStore(None, {}, []), 1.0, tell=lambda found: told.append(found.config)
    ).run()  # type: ignore[arg-type]
    growing = [config for config in told if config.most_blocks]
    assert {config.for_length(length).block_size for config in growing for length in (1024, 4096)} == {16, 64}


def test_too_few_prompts_are_refused():
    with pytest.raises(up.InputError, match="even without any loss that takes 600"):
        calibrate(90, max_loss=0.5)


@pytest.mark.parametrize("text", ["default", "score=peak,score_memory=0.5", "drop_layers=7+11,top_p=0.8", "carry"])
def test_settings_are_described_as_config_takes_them(text: str):
    config = parse_setting(text).config
    assert parse_setting(describe(config)).config == config


def test_the_setting_beside_a_model_is_its_default(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    assert up.LLM.load(folder, "float32").default_config == up.UniPrefillConfig()
    config = up.UniPrefillConfig(top_p=0.6, block_size=16, sink_tokens=16, window_tokens=16, drop_layers=(1,))
    write_setting(setting_path(folder), config, {"loss": 0.1})
    llm = up.LLM.load(folder, "float32")
    assert llm.default_config == config and llm.calibrated is not None
    assert llm.calibrated.evidence == {"loss": 0.1} and llm.calibrated.source.endswith("uniprefill-setting.json")
    prompt = [list(np.random.default_rng(0).integers(0, 100, 200))]
    own, named = llm.prefill(prompt)[0], llm.prefill(prompt, up.UniPrefillConfig.dense())[0]
    assert list(own.kept_positions) == [1] and own.segment_lengths[1] < 200 and named.kept_positions == {}
    content = json.loads((folder / "uniprefill-setting.json").read_text())
    (folder / "uniprefill-setting.json").write_text(json.dumps(content | {"setting": {"top_q": 1}}))
    with pytest.raises(up.ConfigError, match="no field 'top_q'"):
        calibrated_setting(folder)
    (folder / "uniprefill-setting.json").write_text("[]")
    with pytest.raises(up.ConfigError, match="holds no setting"):
        up.LLM.load(folder, "float32")


def test_commands_take_the_setting_unless_told_one(tmp_path: Path):
    """generate, explain and serve: any dropping option replaces the model's own setting as a whole."""
    own = up.UniPrefillConfig(top_p=0.9, score="peak")
    llm: Any = SimpleNamespace(default_config=own, calibrated=CalibratedSetting(own, "its file", {}))
    taken = []

    def command(context: typer.Context, top_p: options.TopPOption = 0.99, seed: int = 0) -> None:
        taken.append(options.own_setting(console, context, up.UniPrefillConfig(top_p=top_p), llm))

    app = typer.Typer()
    app.command()(command)
    with (tmp_path / "console").open("w+") as stream:
        console = Console(file=stream)
        for words in ([], ["--seed", "1"], ["--top-p", "0.99"]):
            app(words, standalone_mode=False)
        stream.seek(0)
        assert stream.read() == "setting: its file\n" * 2
    assert taken == [own, own, up.UniPrefillConfig()]
