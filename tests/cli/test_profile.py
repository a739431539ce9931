"""`uniprefill profile`: traced time falls to the steps that the models name, and none is counted twice."""

import json

import pytest

from uniprefill_jax.bench.step_times import Operation, steps_of, summarise
from uniprefill_jax.cli import main

PROGRAM = """
%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %mul = f32[8]{0} multiply(%p, %p), metadata={op_name="jit(f)/while/body/feed_forward_sublayer/experts/mul"}
}

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %nameless_fusion = f32[8]{0} fusion(%c), kind=kLoop, calls=%fused
  %kernel.3 = (f32[8]{0}, f32[8]{0}) custom-call(%c), metadata={op_name="jit(f)/while/body/attention_full/mpmd"}
  %dot.7 = f32[8]{0} dot(%c, %c), metadata={op_name="jit(f)/shared_expert/feed_forward/dot_general"}
  %copy.1 = f32[8]{0} copy(%c), metadata={op_name="jit(f)/while/body/add"}
  ROOT %all-reduce.5 = f32[8]{0} all-reduce(%c), metadata={op_name="jit(f)/while/body/attention_output/psum"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %while.2 = (s32[], /*index=1*/f32[8]{0}) while(%x), condition=%cond, body=%body
}
"""


def test_steps_of_a_program():
    steps = steps_of(PROGRAM)
    assert steps["nameless_fusion"] == "experts", "a fusion without a name is of what is in it"
    assert steps["kernel.3"] == "attention_full"
    assert steps["dot.7"] == "shared_expert", "a feed-forward layer too, but another step of the cost model"
    assert steps["all-reduce.5"] == "collectives"
    assert steps["copy.1"] == "other"
    assert steps["while.2"] is None


def test_time_is_counted_once():
    operations = [
        Operation("while.2", 0.0, 100.0),
        Operation("kernel.3", 0.0, 40.0),
        Operation("nameless_fusion", 30.0, 30.0),  # beside the kernel for 10 ns
        Operation("kernel.3", 80.0, 20.0),
        Operation("stranger", 100.0, 5.0),
    ]
    profile = summarise(operations, steps_of(PROGRAM))
    assert profile.seconds == pytest.approx({"attention_full": 60e-9, "experts": 30e-9, "other": 5e-9})
    assert profile.counts == {"attention_full": 2, "experts": 1, "other": 1}
    assert profile.span == pytest.approx(105e-9) and profile.gaps == pytest.approx(20e-9)
    assert list(profile.unknown) == ["stranger"]


def test_a_real_trace(tmp_path, capsys):
    path = tmp_path / "profile.json"
    words = f"profile --arch llama-tiny --length 1500 --top-p 0.5 --dtype float32 --json {path} --trace {tmp_path}"
    with pytest.raises(SystemExit, match="0"):
        main(words.split())
    rows = json.loads(path.read_text())["rows"]
    dense, dropping = (
        {row["step"]: row for row in rows if row["method"] == method} for method in ("dense", "top_p=0.5")
    )
    assert {"qkv", "rope", "attention_full", "attention_output", "feed_forward", "norm", "logits"} <= set(dense)
    assert {"score", "select", "compact"} <= set(dropping) and not {"score", "select"} & set(dense)
    for found in (dense, dropping):
        total = sum(row["ms"] for row in found.values())
        span, gaps = found["qkv"]["span_ms"], found["qkv"]["gaps_ms"]
        assert total >= 0.9 * (span - gaps), "something ran that is in no step"
        assert found.get("other", {"ms": 0})["ms"] < 0.3 * total
        assert found["feed_forward"]["tflops_per_second"] > 0
        assert all(row["gb_per_second"] > 0 for step, row in found.items() if step not in ("select", "other"))
    assert "attention_full" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 2
