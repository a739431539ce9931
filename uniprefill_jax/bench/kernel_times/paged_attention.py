"""Decode attention over pages against the memory's speed.

For every case, on fresh random inputs in pages scattered over the pool: the relative error against the reference in
float32 and the device time of the kernel and of the reference. A row's floor is the bytes of the visible keys and
values, of queries and outputs, over the copy rate of the device. Without a kernel for the device, small cases run on
the reference, which shows that the benchmark works and no more.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.paged_attention import choose_backend, paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.shapes import GEMMA_3_12B, LLAMA_3_1_8B, QWEN3_NEXT_80B, Shape
from pallas_kernels.platform import Backend
from uniprefill_jax.bench.kernel_times.conditions import Conditions, Report
from uniprefill_jax.errors import UniPrefillError

DTYPE = "bfloat16"
TOLERANCE = 4e-3  # rounding outputs to bfloat16 alone is 1.7e-3, weights another 1e-3
SMALL_LENGTH, SMALL_BATCH = 256, 4
CACHED = 512 << 20  # bytes: smaller inputs come in several sets, or the second run would find them in the cache


class Case(NamedTuple):
    """A decode step: all requests have `shape.length` rows, or, ragged, anything from 1 to that."""

    shape: Shape
    ragged: bool = False


CASES = (
    Case(Shape(LLAMA_3_1_8B, 16, 32768)),
    Case(Shape(LLAMA_3_1_8B, 64, 4096)),
    Case(Shape(LLAMA_3_1_8B, 1, 131072)),
    Case(Shape(LLAMA_3_1_8B, 16, 4096), ragged=True),
    Case(Shape(LLAMA_3_1_8B, 64, 4096, window=1024)),
    Case(Shape(GEMMA_3_12B, 16, 16384)),
    Case(Shape(QWEN3_NEXT_80B, 16, 32768)),
    Case(Shape(LLAMA_3_1_8B, 16, 128)),  # so short that its time is what a call costs apart from the bytes
)


class Program(NamedTuple):
    """One row to measure."""

    case: Case
    backend: Backend

    @property
    def operation(self) -> Callable[..., jax.Array]:
        """The attention as a function of `arguments`."""
        return partial(paged_attention, scale=self.case.shape.heads.head_dim**-0.5, backend=self.backend)


def programs(quick: bool) -> Iterator[Program]:
    """Everything to measure."""
    is_plain = choose_backend() == "reference"
    for case in CASES:
        shape = case.shape
        if is_plain or quick:
            shape = shape._replace(batch=min(shape.batch, SMALL_BATCH), length=SMALL_LENGTH)
        backend = choose_backend(**shape.heads._asdict(), page=shape.page, dtype=DTYPE)
        for name in dict.fromkeys((backend, "reference")):
            yield Program(Case(shape, case.ragged), name)


def visible_rows(case: Case, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the requests and their first visible rows."""
    shape = case.shape
    lengths = np.full(shape.batch, shape.length)
    if case.ragged:
        lengths = random.integers(1, shape.length + 1, shape.batch)
    first = np.maximum(lengths - shape.window, 0) if shape.window else np.zeros_like(lengths)
    return lengths.astype(np.int32), first.astype(np.int32)


@partial(jax.jit, static_argnums=0)
def arguments(shape: Shape, key: jax.Array, lengths: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
    """Random queries, keys and values in pages of random numbers."""
    heads, kv_heads, head_dim = shape.heads
    keys = jax.random.split(key, 4)
    pool = (shape.num_pages, kv_heads, shape.page, head_dim)
    # Queries of such length that the weights are far from equal.
    queries = 2 * jax.random.normal(keys[0], (shape.batch, heads, head_dim), DTYPE)
    pages = (jax.random.normal(one, pool, DTYPE) for one in keys[1:3])
    table = jax.random.permutation(keys[3], shape.num_pages).reshape(shape.batch, -1).astype(jnp.int32)
    return queries, *pages, table, lengths, first


def exact(
    scale: float, request: jax.Array, queries, key_pages, value_pages, table, lengths, first
) -> Float[Array, "1 H d"]:
    """The reference's outputs in float32 of one request: pools in float32 need not fit beside the others."""
    keys, values = (pool[table[request]].astype(jnp.float32) for pool in (key_pages, value_pages))
    own = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    query = queries[request][None].astype(jnp.float32)
    return paged_attention_reference(
        query, keys, values, own, lengths[request][None], first[request][None], scale=scale
    )


def measure(conditions: Conditions, report: Report) -> None:
    """Compile everything in parallel, then check and time one program after another and hand each row to `report`."""
    seed, selected = conditions.seed, list(dict.fromkeys(programs(conditions.quick)))
    start = time.perf_counter()
    random = np.random.default_rng(seed)
    rows_of = {case: visible_rows(case, random) for case in dict.fromkeys(program.case for program in selected)}

    def build(case: Case, operation: Callable, *leading: jax.Array):
        lengths, first = map(jnp.asarray, rows_of[case])
        shapes = jax.eval_shape(partial(arguments, case.shape), jax.random.key(0), lengths, first)
        return jax.jit(operation).lower(*leading, *shapes).compile()

    def build_exact(case: Case):
        return build(case, partial(exact, case.shape.heads.head_dim**-0.5), jnp.int32(0))

    with ThreadPoolExecutor(12) as pool:
        references = dict(zip(rows_of, pool.map(build_exact, rows_of), strict=True))
        compiled = list(pool.map(lambda program: build(program.case, program.operation), selected))
    print(f"compiled {len(compiled)} programs in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    for case, (lengths, first) in rows_of.items():
        shape = case.shape
        heads, kv_heads, head_dim = shape.heads
        moved = 2 * head_dim * (2 * int((lengths - first).sum()) * kv_heads + 2 * shape.batch * heads)
        count = 2 if moved < CACHED else 1
        sets = [
            arguments(shape, jax.random.key(seed + index), jnp.asarray(lengths), jnp.asarray(first))
            for index in range(count)
        ]
        parts = [references[case](jnp.int32(request), *sets[0]) for request in range(shape.batch)]
        expected = np.concatenate(parts).astype(np.float64)
        labels = {"op": "paged_attention", "batch": shape.batch, "n": shape.length, "ragged": case.ragged}
        labels |= {"rows": int((lengths - first).sum()), "page": shape.page, "window": shape.window}
        labels |= shape.heads._asdict() | {"dtype": DTYPE, "megabytes": moved / 1e6}
        for program, run in zip(selected, compiled, strict=True):
            if program.case != case:
                continue
            found = np.asarray(run(*sets[0]), np.float64)
            error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
            if not error <= TOLERANCE:
                raise UniPrefillError(f"paged_attention {program.backend} {case}: relative error {error:.2e}")
            median = conditions.timer.milliseconds(run, sets, repeats=conditions.repeats)
            report(
                labels
                | {"backend": program.backend, "terabytes_per_second": moved / median / 1e9}
                | conditions.timing(median, moved=moved)
                | {"relative_error": error}
            )
        del sets
