"""The steps of a drop: block scores, top-p selection, compaction, and all of them together.

Checks first (accuracy against float64, kept sets, bit-identical repeats), then device times with fresh random inputs.
A row's floor is the larger of its least bytes over the copy rate and its matrix operations over the product rate.
"""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_score import block_score, shapes
from pallas_kernels.block_score import choose_backend as score_backend
from pallas_kernels.compact_rows import choose_backend as compact_backend
from pallas_kernels.compact_rows import compact_rows
from pallas_kernels.compact_rows.shapes import SHAPES as COMPACT_SHAPES
from pallas_kernels.compact_rows.shapes import Shape as CompactShape
from pallas_kernels.platform import Backend, Kernels
from pallas_kernels.top_p_select import choose_backend as select_backend
from pallas_kernels.top_p_select import top_p_select
from uniprefill_jax.bench.kernel_times.conditions import Conditions, Report, cumulative_lengths
from uniprefill_jax.bench.kernel_times.drop_checks import accuracy, kept_sets, repeats

SINK, WINDOW, TOP_P, WIDTH = 128, 128, 0.9, 4096
CACHED_BELOW = 32768  # rows: smaller inputs come in several sets, or the second run would find them in the cache


class Case(NamedTuple):
    """One row to measure: what to call, how to make its arguments, and the least it must do."""

    labels: dict[str, Any]
    operation: Callable[..., Any]
    arguments: Callable[[jax.Array], tuple[Any, ...]]
    sets: int
    bytes: float
    operations: float


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


def measure(conditions: Conditions, report: Report) -> None:
    """Check, compile everything in parallel, then time one case after another and hand each row to `report`."""
    seed = conditions.seed
    for row in [*accuracy(seed), kept_sets(seed, 100 if conditions.quick else 1000), repeats(seed)]:
        report(row)
    selected = cases(conditions.quick)

    def program_of(case: Case) -> str:
        return json.dumps({name: value for name, value in case.labels.items() if name != "kept"})

    def build(case: Case):
        return jax.jit(case.operation).lower(*jax.eval_shape(case.arguments, jax.random.key(0))).compile()

    start = time.perf_counter()
    distinct = {program_of(case): case for case in selected}
    with ThreadPoolExecutor(12) as pool:
        programs = dict(zip(distinct, pool.map(build, distinct.values()), strict=True))
    print(f"compiled {len(programs)} programs in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    for case in selected:
        make = jax.jit(case.arguments)
        sets = [make(jax.random.key(seed + number)) for number in range(case.sets)]
        median = conditions.timer.milliseconds(programs[program_of(case)], sets, repeats=conditions.repeats)
        report(case.labels | conditions.timing(median, moved=case.bytes, operations=case.operations))
