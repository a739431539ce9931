"""Kernels against their references and against the hardware: python -m benchmarks.kernels --json PATH [--quick].

Checks first (accuracy against float64, kept sets, bit-identical repeats), then device times with fresh random inputs.
A row's floor is the larger of its least bytes over the copy rate and its matrix operations over the product rate of the
device: the best that was ever measured for a device in CEILINGS, else what the same run measures.
"""

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels_checks import accuracy, kept_sets, repeats
from benchmarks.kernels_timing import DeviceTimer
from pallas_kernels.block_score import block_score, shapes
from pallas_kernels.block_score import choose_backend as score_backend
from pallas_kernels.compact_rows import choose_backend as compact_backend
from pallas_kernels.compact_rows import compact_rows
from pallas_kernels.compact_rows.shapes import SHAPES as COMPACT_SHAPES
from pallas_kernels.compact_rows.shapes import Shape as CompactShape
from pallas_kernels.platform import Backend, Kernels
from pallas_kernels.top_p_select import choose_backend as select_backend
from pallas_kernels.top_p_select import top_p_select

SINK, WINDOW, TOP_P, WIDTH = 128, 128, 0.9, 4096
CACHED_BELOW = 32768  # rows: smaller inputs come in several sets, or the second run would find them in the cache

# Bytes/s of a device-to-device copy and bfloat16 operations/s of a large product, measured on such devices.
CEILINGS = {"NVIDIA H200": (4.3e12, 790e12)}


class Case(NamedTuple):
    """One row to measure: what to call, how to make its arguments, and the least it must do."""

    labels: dict[str, Any]
    operation: Callable[..., Any]
    arguments: Callable[[jax.Array], tuple[Any, ...]]
    sets: int
    bytes: float
    operations: float


def cumulative_lengths(batch: int, length: int) -> np.ndarray:
    """Packed lengths that fill `batch * length` rows; unequal and not multiples of anything where there are several."""
    lengths = np.full(batch, length)
    for r in range(batch // 2):
        shift = (37 * (r + 1)) % (length // 4)
        lengths[2 * r] -= shift
        lengths[2 * r + 1] += shift
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def score_case(shape: shapes.Shape, backend: Backend) -> Case:
    """Block scores of one shape."""
    (heads, kv_heads, head_dim), batch, window = shape.heads, shape.batch, shape.window
    cu_seqlens = cumulative_lengths(batch, shape.length)
    num_blocks = -(-int(np.diff(cu_seqlens).max()) // shape.block_size)

    def operation(queries, keys, cu):
        return block_score(
            queries,
            keys,
            cu,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            scale=head_dim**-0.5,
            backend=backend,
        ).mass

    def arguments(key):
        first, second = jax.random.split(key)
        queries = jax.random.normal(first, (batch, window, heads, head_dim), jnp.bfloat16)
        keys = jax.random.normal(second, (shape.rows, kv_heads, head_dim), jnp.bfloat16)
        return queries, keys, jnp.asarray(cu_seqlens)

    read = 2 * head_dim * (shape.rows * kv_heads + batch * window * heads)
    return Case(
        _labels("block_score", shape.length, batch, shape.heads, backend),
        operation,
        arguments,
        _sets(shape.rows),
        read + 4 * batch * num_blocks,
        2.0 * window * heads * head_dim * shape.rows,
    )


def select_case(length: int, batch: int, backend: Backend) -> Case:
    """Top-p selection over blocks of 64."""
    cu_seqlens = cumulative_lengths(batch, length)
    num_blocks = -(-int(np.diff(cu_seqlens).max()) // 64)

    def operation(scores, cu, top_p):
        return top_p_select(
            scores,
            cu,
            top_p,
            num_rows=batch * length,
            block_size=64,
            sink_tokens=SINK,
            window_tokens=WINDOW,
            backend=backend,
        )

    def arguments(key):
        return jax.random.uniform(key, (batch, num_blocks)) ** 8, jnp.asarray(cu_seqlens), jnp.float32(TOP_P)

    return Case(
        _labels("top_p_select", length, batch, None, backend) | {"dtype": "float32"},
        operation,
        arguments,
        _sets(0),
        batch * num_blocks * 9 + 4 * batch * length,
        0.0,
    )


def compact_case(shape: CompactShape, kept_blocks: float, backend: Backend) -> Case:
    """Row compaction that keeps a random share of the blocks of 64 rows."""
    rows = shape.rows
    count = int(rows * kept_blocks) // 64 * 64

    def operation(array, indices, kept):
        return compact_rows((array,), indices, kept, out_rows=rows, backend=backend)

    def arguments(key):
        first, second = jax.random.split(key)
        blocks = jnp.sort(jax.random.permutation(first, rows // 64)[: count // 64])
        indices = (blocks[:, None] * 64 + jnp.arange(64)).reshape(-1)
        indices = jnp.pad(indices, (0, rows - count), constant_values=rows).astype(jnp.int32)
        array = jax.random.normal(second, (rows, shape.width), jnp.float32).astype(shape.dtype)
        return array, indices, jnp.int32(count)

    row_bytes = shape.width * jnp.dtype(shape.dtype).itemsize
    labels = _labels("compact_rows", rows, 1, None, backend)
    return Case(
        labels | {"dtype": shape.dtype, "width": shape.width, "kept": kept_blocks},
        operation,
        arguments,
        _sets(rows),
        row_bytes * (count + rows),
        0.0,
    )


def drop_case(shape: shapes.Shape, backend: Backend) -> Case:
    """The whole step between two segments: score, select, gather hidden rows and positions; about 3/4 stays."""
    score = score_case(shape, backend)
    rows = shape.rows

    def operation(queries, keys, cu, hidden, positions):
        scores = score.operation(queries, keys, cu)
        kept = top_p_select(
            scores,
            cu,
            jnp.float32(0.7),
            num_rows=rows,
            block_size=shape.block_size,
            sink_tokens=SINK,
            window_tokens=WINDOW,
            backend=backend,
        )
        # Positions go by the choice of "auto" in both rows: no kernel moves rows of four bytes.
        moved = compact_rows((hidden,), kept.indices, kept.cu_seqlens[-1], out_rows=rows, backend=backend)
        return *moved, *compact_rows((positions,), kept.indices, kept.cu_seqlens[-1], out_rows=rows), kept.cu_seqlens

    def arguments(key):
        first, second = jax.random.split(key)
        hidden = jax.random.normal(second, (rows, WIDTH), jnp.bfloat16)
        return *score.arguments(first), hidden, jnp.arange(rows, dtype=jnp.int32)

    return Case(
        score.labels | {"op": "drop_step", "width": WIDTH, "kept": 0.7},
        operation,
        arguments,
        score.sets,
        score.bytes + rows * WIDTH * 2 * 1.7,
        score.operations,
    )


def _labels(op: str, n: int, batch: int, heads: shapes.Heads | None, backend: Backend) -> dict[str, Any]:
    named = {} if heads is None else dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    return {"op": op, "n": n, "batch": batch, **named, "dtype": "bfloat16", "backend": backend}


def _sets(rows: int) -> int:
    return 8 if rows < CACHED_BELOW else 2


def cases(quick: bool) -> list[Case]:
    """Everything to measure; quick: two short lengths of one family."""
    backends: dict[str, Kernels] = {
        "score": score_backend(),
        "select": select_backend(),
        "compact": compact_backend(),
    }
    lengths = (1024, 4096) if quick else shapes.LENGTHS
    rows: list[Case] = []
    for shape in COMPACT_SHAPES:
        if not quick or shape.rows in lengths:
            for kept in (1.0, 0.5):
                rows += [compact_case(shape, kept, backend) for backend in _both(backends["compact"])]
    for shape in shapes.SHAPES:
        if shape.length not in lengths or (quick and (shape.heads, shape.batch) != (shapes.LLAMA_3_1_8B, 1)):
            continue
        rows += [score_case(shape, backend) for backend in _both(backends["score"])]
        if shape.heads == shapes.LLAMA_3_1_8B:
            rows += [select_case(shape.length, shape.batch, backend) for backend in _both(backends["select"])]
            if shape.batch == 1 or shape.length in (4096, 16384):
                rows += [drop_case(shape, backend) for backend in _both(backends["compact"])]
    return rows


def _both(kernel: Kernels) -> tuple[Backend, ...]:
    return ("reference",) if kernel == "reference" else ("reference", kernel)


def measure(timer: DeviceTimer, selected: list[Case], seed: int, repeats_of_each: int, report: Callable) -> None:
    """Compile everything in parallel, then time one case after another and hand each row to `report`."""
    size = 1 << (29 if timer.on_accelerator else 24)
    copy = Case(
        {}, lambda x: x + jnp.bfloat16(1), lambda key: (jax.random.normal(key, (size,), jnp.bfloat16),), 2, 0, 0
    )

    def program_of(case: Case) -> str:
        return json.dumps({name: value for name, value in case.labels.items() if name != "kept"})

    def build(case: Case):
        return jax.jit(case.operation).lower(*jax.eval_shape(case.arguments, jax.random.key(0))).compile()

    start = time.perf_counter()
    distinct = {program_of(case): case for case in [copy, *selected]}
    with ThreadPoolExecutor(12) as pool:
        programs = dict(zip(distinct, pool.map(build, distinct.values()), strict=True))
    print(f"compiled {len(programs)} programs in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    def time_of(case: Case) -> float:
        make = jax.jit(case.arguments)
        sets = [make(jax.random.key(seed + i)) for i in range(case.sets)]
        return timer.milliseconds(programs[program_of(case)], sets, repeats=repeats_of_each)

    copy_rate = 4 * size / (time_of(copy) * 1e-3)
    product_rate = timer.product_tflops() * 1e12 if timer.on_accelerator else float("inf")
    if timer.on_accelerator:
        measured = {"copy_tb_per_s": copy_rate / 1e12, "bfloat16_product_tflops": product_rate / 1e12}
        report({"op": "ceilings", **measured, "resolution_ms": timer.resolution()})
    copy_rate, product_rate = CEILINGS.get(jax.devices()[0].device_kind, (copy_rate, product_rate))
    for case in selected:
        median = time_of(case)
        floor = max(case.bytes / copy_rate, case.operations / product_rate) * 1e3
        report(case.labels | {"median_ms": median, "floor_ms": floor, "share_of_floor": floor / median})


def main() -> None:
    """Run the checks and the measurements, and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--quick", action="store_true", help="two short lengths of one model, fewer repeats")
    options = parser.parse_args()
    seed = time.time_ns() % (1 << 31)
    timer = DeviceTimer()
    report = {
        "command": "python -m benchmarks.kernels" + (" --quick" if options.quick else ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": getattr(jax.devices()[0], "device_kind", platform.machine()),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": version("jaxlib")},
        "seed": seed,
        "rows": [],
    }
    report["checks"] = {
        "accuracy": accuracy(seed),
        "kept_sets": kept_sets(seed, 100 if options.quick else 1000),
        "repeats": repeats(seed),
    }
    print(json.dumps(report["checks"]), file=sys.stderr, flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def add(row: dict[str, Any]) -> None:
        report["rows"].append(row)
        options.json.write_text(json.dumps(report, indent=1) + "\n")  # after every row: a cut run keeps what it has
        print(json.dumps(row), file=sys.stderr, flush=True)

    measure(timer, cases(options.quick), seed, 3 if options.quick else 7, add)


if __name__ == "__main__":
    main()
