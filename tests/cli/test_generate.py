"""`uniprefill generate` and `convert` on the packaged SmolLM2-135M."""

import json
from pathlib import Path

import pytest

from uniprefill_jax.cli import main

PROMPT = "The capital of France is"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Standard output of a command that must succeed."""
    with pytest.raises(SystemExit) as exit_information:
        main(list(arguments))
    captured = capsys.readouterr()
    assert exit_information.value.code == 0, captured.err
    return captured.out


def test_text_from_every_source_streamed_chatted_and_from_a_converted_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompt_file, plain_file, chat_file = (tmp_path / name for name in ("prompt.txt", "plain.json", "chat.json"))
    prompt_file.write_text(PROMPT)
    common = ("--max-tokens", "6", "--dtype", "float32")
    dense = (*common, "--dense", "--no-chat")
    plain = run(capsys, "generate", "smollm2-135m", *dense, "--prompt", PROMPT, "--json", str(plain_file))
    row = json.loads(plain_file.read_text())["rows"][0]
    assert row["text"] == plain.removesuffix("\n") and len(row["token_ids"]) == 6
    assert (row["finish_reason"], row["kept"], row["flop_fraction"]) == ("length", [row["n"]], 1.0)

    before, stop, _ = plain.partition("Paris")
    assert stop
    streamed = run(
        capsys, "generate", "smollm2-135m", *dense, "--prompt-file", str(prompt_file), "--stream", "--stop", stop
    )
    assert streamed.removesuffix("\n") == before

    # As a user's turn the same words make a longer prompt.
    run(capsys, "generate", "smollm2-135m", *common, "--prompt", PROMPT, "--json", str(chat_file))
    assert json.loads(chat_file.read_text())["rows"][0]["n"] > row["n"]

    converted = str(tmp_path / "converted")
    run(capsys, "convert", "smollm2-135m", converted, "--dtype", "float32")
    assert run(capsys, "generate", converted, *dense, "--prompt", PROMPT) == plain
    with pytest.raises(SystemExit) as exit_information:
        main(["convert", "smollm2-135m", converted])
    assert exit_information.value.code == 2
    assert converted in capsys.readouterr().err


def test_damaged_file_is_one_line_and_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    damaged = tmp_path / "model.safetensors"
    damaged.write_text("this is not a checkpoint")
    destination = tmp_path / "converted"
    with pytest.raises(SystemExit) as exit_information:
        main(["convert", str(damaged), str(destination)])
    error = capsys.readouterr().err
    assert exit_information.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and str(damaged) in error
    assert list(tmp_path.iterdir()) == [damaged]


@pytest.mark.parametrize("changes", [["--drop-layers", "29"], ["--drop-layers", "99"]])
def test_drop_layer_that_the_model_lacks(changes: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_information:
        main(["generate", "smollm2-135m", "--prompt", PROMPT, *changes])
    error = capsys.readouterr().err
    assert exit_information.value.code == 2
    progress, message = error.splitlines()
    assert progress.startswith("read smollm2-135m") and message.startswith("error: drop_layers: layer " + changes[1])
