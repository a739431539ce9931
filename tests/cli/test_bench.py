"""`uniprefill bench`: the rows hold together, and transformers is timed on the same shapes."""

import json

import numpy as np
import pytest
from rich.console import Console

import uniprefill_jax as up
from benchmarks import cpu_guard
from tests.conftest import ORACLE_PYTHON
from uniprefill_jax.bench.methods import break_even_rows
from uniprefill_jax.bench.methods_table import print_methods, scores_of
from uniprefill_jax.bench.report import build_report
from uniprefill_jax.bench.throughput import Load
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
        ("methods --arch llama-tiny --method quest", "use some of dense"),
        ("throughput --arch llama-tiny --goodput tpt:3", "--goodput names 'tpt'"),
        ("throughput --arch llama-tiny --interference 3:4", "use RUNNING:SHORT:LONG"),
        ("throughput --arch llama-tiny --decoding 3", "use RUNNING:LENGTH"),
        ("throughput --arch llama-tiny --request-rate 0", "--request-rate 0.0"),
        ("throughput --arch llama-tiny --lengths none", "give --decoding or --interference"),
        ("kernels --only drop,softmax", "--only names 'softmax'"),
    ],
)
def test_wrong_options(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *([] if words.startswith(("throughput", "kernels", "methods")) else ["ttft"]), *words.split()])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_methods(tmp_path):
    path, accuracy = tmp_path / "methods.json", tmp_path / "ruler.json"
    accuracy.write_text(json.dumps({"rows": []}))
    words = "bench methods --arch llama-tiny --lengths 400,900 --runs 2 --seconds 0 --dtype float32 --method"
    chosen = "uniprefill:top_p=0.5:sink_tokens=0,xattention:threshold=0.2"
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), chosen, "--accuracy", str(accuracy), "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == [*chosen.split(","), "dense"] * 2 + chosen.split(",")
    dropped, sparse, dense = rows[3:6]
    assert dropped["computed_attention"] == 1.0 > sparse["computed_attention"] and dropped["kept"][1] < 900
    assert 1 < sparse["ideal_speedup"] and dense["speedup"] == 1.0 and all(row["peak_gib"] > 0 for row in rows[:6])


def test_the_table_of_methods(tmp_path):
    def row(method, n, speedup, ideal=2.0):
        labels = {"arch": "tiny", "batch": 1, "tp": 1, "dtype": "float32", "method": method, "n": n}
        return labels | {
            "speedup": speedup,
            "ideal_speedup": ideal,
            "computed_attention": 0.5,
            "peak_gib": n / 100,
        }

    rows = [row("late", n, speed) for n, speed in ((100, 1.2), (200, 0.9), (400, 1.1), (800, 1.5))]
    rows += [row("never", n, 0.8) for n in (100, 800)] + [row("dense", n, 1.0) for n in (100, 800)]
    # At 100 it is dense, and the clock's noise no gain.
    rows += [row("dense at first", n, speed, ideal) for n, speed, ideal in ((100, 1.01, 1.0), (400, 1.4, 1.6))]
    ends = break_even_rows(rows)
    found = {end["method"]: end["break_even"] for end in ends}
    assert found == {"late": 400, "never": None, "dense at first": 400}
    path = tmp_path / "ruler.json"
    scores = [("late", 100, "vt", 3.0), ("late", 100, "average", 60.0), ("late", 200, "vt", 70.0)]
    names = ("config", "length", "task", "score")
    path.write_text(json.dumps({"rows": [dict(zip(names, values, strict=True)) for values in scores]}))
    print_methods(console := Console(record=True, width=200), rows, ends, scores_of(path))
    late = next(line for line in console.export_text().splitlines() if "late" in line)
    cells = [cell.strip() for cell in late.split("│")[1:-1]]
    assert cells == ["late", "60.00", "70.00", "65.00", *(f"{x}x (0.50)" for x in ("1.20", "0.90", "1.10", "1.50"))] + [
        "8.00",
        "400",
    ]
    path.write_text("[]")
    with pytest.raises(up.InputError, match="is no result file"):
        scores_of(path)


def test_throughput(tmp_path):
    path = tmp_path / "throughput.json"
    words = (
        "bench throughput --arch llama-tiny --lengths 300 --batches 3 --output-len 3 --top-p 0.5 --prefill-chunk 256 "
        "--max-running 3 --pool-gib 0.01 --interference 2:64:400 --decoding 3:40 --goodput ttft:1e9,tpot:0 "
        "--dtype float32 --json"
    )
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), str(path)])
    decoding, _, dense, dropping, disturbed, _ = json.loads(path.read_text())["rows"]
    assert [dense["method"], dropping["method"]] == ["dense", "top_p=0.5"]
    assert dense["kept_fraction"] == 1.0 > dropping["kept_fraction"]
    # 16 layers, 3 requests, pages of 64 tokens.
    assert dense["pages"] == 16 * 3 * 5 > dropping["pages"]
    assert dense["prompt_pages"] == 16 * 5 > dropping["prompt_pages"]
    assert dense["gain"] == 1.0 and dropping["gain"] == pytest.approx(
        dropping["tokens_per_s"] / dense["tokens_per_s"], rel=1e-3
    )
    for row in (dense, dropping):
        assert row["request_goodput"] == 0.0, "no token comes after no time at all"
        assert row["median_ttft_ms"] <= row["p99_ttft_ms"] <= row["p99_e2el_ms"]
        assert row["output_throughput"] == pytest.approx(3 * row["request_throughput"], rel=1e-2)
        assert 0 < row["host_share"] <= 1.5
    assert disturbed["p99_itl_busy_ms"] >= disturbed["median_itl_busy_ms"] > 0
    assert disturbed["tokens_meanwhile"] >= 2 and disturbed["long_ttft_ms"] > 0
    assert disturbed["whole_prefill_ms"] > 0
    assert decoding["method"] == "dense, decoding" and 0 < decoding["host_ms_per_step"]
    assert decoding["tokens_per_s"] == pytest.approx(3e3 / decoding["step_ms"], rel=1e-2)


def test_decode_steps_alone(tmp_path):
    path = tmp_path / "decoding.json"
    words = "bench throughput --arch llama-tiny --lengths none --decoding 2:40 --top-p 0.5 --pool-gib 0.01 --json"
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == ["dense, decoding", "top_p=0.5, decoding"]


def test_guard_names_what_is_over_its_limit():
    limits = json.loads(cpu_guard.LIMITS.read_text())
    assert cpu_guard.exceeded(limits, limits) == []
    assert cpu_guard.exceeded(limits | {"compile": limits["compile"] + 0.1, "import": float("nan")}, limits) == [
        "import",
        "compile",
    ]
    with pytest.raises(KeyError, match="unheard"):
        cpu_guard.exceeded({"unheard": 1.0}, limits)


def test_arrivals_follow_the_rate():
    load = Load(num_prompts=4000, input_len=4, range_ratio=0.5, request_rate=50.0, burstiness=4.0)
    arrivals = load.draw(vocab_size=10)
    gaps = np.diff([arrival.at for arrival in arrivals])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean() / 2, rel=0.1), "burstiness 4 halves the spread of a Poisson process"
    assert {len(arrival.prompt) for arrival in arrivals} == {2, 3, 4, 5, 6}
    assert load.draw(vocab_size=10)[7] == arrivals[7], "the same requests for every method"


KERNELS = [
    "paged_attention",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("drop", "causal_attention", "gated_delta_rule")),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("chunk_attention", "block_sparse_attention", "grouped_matmul")
    ),
]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name, tmp_path, capsys):
    path = tmp_path / "kernels.json"
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "kernels", "--only", name, "--quick", "--seed", "3", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    ceilings, *rest = rows
    assert ceilings["op"] == "ceilings" and ceilings["seed"] == 3
    timed = [row for row in rest if "median_ms" in row]
    assert {"drop": "drop_step"}.get(name, name) in {row["op"] for row in timed}
    for row in timed:
        assert row["n"] > 0 and {"dtype", "backend", "floor_ms"} <= set(row)
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["median_ms"])
        assert row["median_ms"] > 0 and row.get("relative_error", 0) < 5e-3
    # What the command writes the report shows, all of it.
    page, unreadable = build_report(tmp_path)
    assert unreadable == [] and page.count("<tr>") > len(rows)
