"""What the dropping machinery costs and gains in the fused prefill: dense, p = 1 with everything scored, and p < 1.

    python -m benchmarks.prefill_overhead --arch llama-3.1-8b --lengths 4096,8192 --json benchmarks/results/prefill.json

Random weights and fresh random tokens in every run; dense and dropping runs alternate; medians. With random weights
attention is nearly flat, so p sets the kept fraction directly. `ideal_speedup` is the cost model's on the kept lengths
of that run.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.architectures import ARCHITECTURES
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.llm import DTYPES, LLM
from uniprefill_jax.prefill import LengthsBy, PrefillPlan
from uniprefill_jax.result_file import write_result
from uniprefill_jax.sparsify.drop_layers import auto_drop_layers


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="llama-3.1-8b")
    parser.add_argument("--lengths", default="4096,8192,32768,131072")
    parser.add_argument("--top-p", default="1.0,0.8,0.6")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--lengths-by",
        choices=get_args(LengthsBy),
        default="auto",
        help="how work follows the kept rows (see PrefillPlan)",
    )
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    llm = LLM.from_config(ARCHITECTURES[options.arch], dtype=options.dtype)
    rows: list[dict[str, Any]] = []
    command = " ".join(["python -m benchmarks.prefill_overhead", *sys.argv[1:]])
    for length in map(int, options.lengths.split(",")):
        top_ps = [float(p) for p in options.top_p.split(",")]
        rows += measure(llm, options.arch, length, top_ps, options.runs, options.lengths_by)
        # Written after every length, so that a run cut short still leaves what it measured.
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_result(options.json, command, rows)


def measure(
    llm: LLM, arch: str, length: int, top_ps: list[float], runs: int, lengths_by: LengthsBy
) -> list[dict[str, Any]]:
    """Rows of one prompt length: dense first, then every top_p."""
    drop_layers = auto_drop_layers(llm.config)
    setting = UniPrefillConfig(top_p=0.5, drop_layers=drop_layers)
    batch = ([length], DTYPES[llm.dtype], lengths_by)
    dense = PrefillPlan.for_batch(llm.config, UniPrefillConfig.dense(), (), *batch)
    plans: dict[float | None, PrefillPlan] = {None: dense}
    for top_p in top_ps:
        config = replace(setting, top_p=top_p)
        plans[top_p] = PrefillPlan.for_batch(llm.config, config, drop_layers, *batch)
    random = np.random.default_rng(length)
    times: dict[float | None, list[float]] = {top_p: [] for top_p in plans}
    compile_seconds: dict[float | None, float] = {}
    segments: dict[float | None, Any] = {}
    for repeat in range(runs + 1):
        for top_p, plan in plans.items():
            tokens = np.zeros(plan.num_rows, np.int32)
            tokens[:length] = random.integers(0, llm.config.vocab_size, length)
            inputs = jax.block_until_ready((jnp.asarray(tokens), jnp.asarray([0, length], jnp.int32)))
            run, compiling = llm.programs.prefill(plan, *inputs)
            start = time.perf_counter()
            output = jax.block_until_ready(run())
            seconds = time.perf_counter() - start
            if not bool(jnp.isfinite(output.logits[0]).all()):
                raise SystemExit(f"logits are not finite at n={length}, top_p={top_p}")
            if repeat == 0:
                compile_seconds.setdefault(top_p, compiling)
                segments[top_p] = jax.device_get(output.segments)
            else:
                times[top_p].append(seconds)
            del output, run
    dense_ms = statistics.median(times[None]) * 1e3
    rows = []
    for top_p, plan in plans.items():
        milliseconds = statistics.median(times[top_p]) * 1e3
        kept = [int(cu[1]) for cu in segments[top_p].cu_seqlens]
        positions = [
            row[: int(cu[1])] for row, cu in zip(segments[top_p].positions, segments[top_p].cu_seqlens, strict=True)
        ]
        flops, dense_flops = plan.flops(positions), plan.dense_flops(positions[0])
        rows.append(
            {
                "arch": arch,
                "n": length,
                "batch": 1,
                "dtype": llm.dtype,
                "lengths_by": lengths_by,
                "method": "dense" if top_p is None else "uniprefill",
                "top_p": top_p,
                "kept": kept,
                "ttft_ms": round(milliseconds, 3),
                "ttft_min_ms": round(min(times[top_p]) * 1e3, 3),
                "ttft_max_ms": round(max(times[top_p]) * 1e3, 3),
                "dense_ttft_ms": round(dense_ms, 3),
                "speedup": round(dense_ms / milliseconds, 4),
                "ideal_speedup": round(dense_flops / flops, 4),
                "tflops_per_second": round(flops / milliseconds * 1e-9, 1),
                "compile_s": round(compile_seconds[top_p], 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    main()
