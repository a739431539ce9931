"""Ratios that hold on any machine, against stored limits: python -m benchmarks.cpu_guard [--json PATH].

Absolute times differ from machine to machine; what the machinery costs beside the work it serves hardly does. Ends with
exit code 1 and the names of the ratios that are over their limits (`benchmarks/cpu_limits.json`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax

from uniprefill_jax.bench.throughput import Load, run_load
from uniprefill_jax.bench.ttft import Measurement
from uniprefill_jax.config import EngineConfig, UniPrefillConfig
from uniprefill_jax.engine.engine import Engine
from uniprefill_jax.llm import LLM
from uniprefill_jax.result_file import write_result

LIMITS = Path(__file__).with_name("cpu_limits.json")
TOKENS = 1536


def main() -> None:
    """Measure, print and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are among what is measured
    measured = import_ratio() | prefill_ratios(LLM.load("smollm2-135m", dtype="float32"))
    limits = json.loads(LIMITS.read_text())
    over = exceeded(measured, limits)
    rows = [{"ratio": name, "measured": round(value, 4), "most": limits[name]} for name, value in measured.items()]
    for row in rows:
        print(f"{row['ratio']:24} {row['measured']:8.3f}  at most {row['most']}{'  OVER' * (row['ratio'] in over)}")
    if options.json is not None:
        write_result(options.json, " ".join(["python -m benchmarks.cpu_guard", *sys.argv[1:]]), rows)
    if over:
        sys.exit(f"over their limits: {', '.join(over)}")


def exceeded(measured: dict[str, float], limits: dict[str, float]) -> list[str]:
    """Names of the ratios over their limits; KeyError for one that has no limit."""
    return [name for name, value in measured.items() if not value <= limits[name]]


def import_ratio() -> dict[str, float]:
    """Importing the library with its models, over importing what it cannot do without."""

    def seconds(statement: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    own = seconds("import uniprefill_jax; uniprefill_jax.LLM")
    return {"import": own / seconds("import jax, flax.nnx, jax.experimental.pallas")}


def prefill_ratios(llm: LLM) -> dict[str, float]:
    """What dropping's machinery costs: in compile time, at top_p = 1, and beside the ideal; the engine's host time."""
    measurement = Measurement("smollm2-135m", (1.0, 0.5), UniPrefillConfig(), runs=6, seconds=120.0)
    dense, scored, dropped = measurement.rows(llm, TOKENS, 1)
    engine = Engine(llm, EngineConfig(pool_pages=8192, max_running=4, prefill_chunk=256, max_length=1024))
    load = Load(num_prompts=4, input_len=128, output_len=48)
    run_load(engine, Load(num_prompts=4, input_len=128, output_len=2), UniPrefillConfig.dense())
    outcome = run_load(engine, load, UniPrefillConfig.dense())
    return {
        "compile": scored["compile_s"] / dense["compile_s"],
        "overhead_at_top_p_1": 1 / scored["speedup"] - 1,
        "lost_of_ideal": 1 - dropped["speedup"] / dropped["ideal_speedup"],
        "host_share_of_engine": outcome.host_seconds / outcome.seconds,
    }


if __name__ == "__main__":
    main()
