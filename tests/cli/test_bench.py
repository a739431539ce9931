"""`uniprefill bench ttft`: its rows hold together, and transformers is timed on the same shapes."""

import json

import pytest

from tests.conftest import ORACLE_PYTHON
from uniprefill_jax.cli import main


def test_ttft(tmp_path, capsys):
    path = tmp_path / "ttft.json"
    words = (
        "bench ttft --arch llama-tiny --lengths 600 --batches 2 --top-p 1.0,0.5 --runs 2 --seconds 0 --dtype float32"
    )
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), "--compare-python", str(ORACLE_PYTHON), "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row for row in printed if "method" in row] == rows
    dense, scored, dropped = rows
    assert [dense["method"], scored["top_p"], dropped["top_p"]] == ["dense", 1.0, 0.5]
    assert all((row["n"], row["batch"]) == (600, 2) for row in rows)
    assert dense["hf_ttft_ms"] > 0 and dense["kept"] == [600]
    assert scored["kept"] == [600] * 3, "at top_p = 1 everything is scored and kept"
    assert scored["ideal_speedup"] < 1 < dropped["ideal_speedup"]
    for row in (scored, dropped):
        assert row["speedup"] == pytest.approx(row["dense_ttft_ms"] / row["ttft_ms"], rel=1e-3)
    assert max(dropped["kept"][1:]) < 600, "nothing was dropped"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--arch gpt-2", "--arch is 'gpt-2'; use one of llama-3.1-8b"),
        ("", "name either --arch or --model"),
        ("--arch llama-tiny --lengths 4k", "--lengths is '4k'; use numbers"),
        ("--arch llama-tiny --lengths 0", "length 0 with batch 1"),
        ("--arch llama-tiny --top-p 2", "top_p is 2.0"),
        ("--model smollm2-135m --compare-python python3", "name an --arch"),
    ],
)
def test_wrong_options(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "ttft", *words.split()])
    assert message in capsys.readouterr().err
