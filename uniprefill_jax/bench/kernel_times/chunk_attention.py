"""Attention of prefill chunks over pages against the hardware.

For every shape, on fresh random inputs in pages scattered over the pool: the relative error of some rows against the
reference of decode attention in float32, and the device time of the kernel and, at short lengths, of the plain
reference. A row's floor is the matrix operations that its visible pairs need over the product rate of the device.
Without a kernel for the device, small shapes run on the reference, which shows that the benchmark works and no more.
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

from pallas_kernels.chunk_attention import ChunkRows, choose_backend, chunk_attention
from pallas_kernels.chunk_attention.shapes import SHAPES, Shape
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.platform import Backend
from uniprefill_jax.bench.kernel_times.conditions import Conditions, Report
from uniprefill_jax.errors import UniPrefillError

DTYPE = "bfloat16"
TOLERANCE = 4e-3  # rounding outputs to bfloat16 alone is 1.7e-3, weights another 1e-3
CHECKED_ROWS = 8
SMALL_ROWS, SMALL_LENGTH = 128, 512
PLAIN_LENGTH = 4096  # the reference is measured up to here


class Program(NamedTuple):
    """One row to measure."""

    shape: Shape
    backend: Backend

    def operation(self, *arrays: jax.Array) -> jax.Array:
        """The attention as a function of `arguments`."""
        queries, keys, values, tables, starts, *rows = arrays
        scale = self.shape.heads.head_dim**-0.5
        return chunk_attention(
            queries, keys, values, tables, starts, ChunkRows(*rows), scale=scale, backend=self.backend
        )


def programs(quick: bool) -> Iterator[Program]:
    """Everything to measure."""
    shapes = SHAPES
    if quick or choose_backend() == "reference":
        small = (shape._replace(rows=SMALL_ROWS, length=SMALL_LENGTH, batch=min(shape.batch, 2)) for shape in SHAPES)
        shapes = tuple(dict.fromkeys(small))
    for shape in shapes:
        backend = choose_backend(**shape.heads._asdict(), page=shape.page, dtype=DTYPE)
        plain = ("reference",) if shape.length <= PLAIN_LENGTH else ()
        for name in dict.fromkeys((backend, *plain)):
            yield Program(shape, name)


def first_visible(shape: Shape) -> np.ndarray:
    """First row that every row of one request's chunk sees."""
    rows = np.arange(shape.length - shape.rows, shape.length)
    return np.zeros_like(rows) if shape.window is None else np.maximum(rows - shape.window + 1, 0)


@partial(jax.jit, static_argnums=0)
def arguments(shape: Shape, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random queries, and keys and values in pages of random numbers; every request has a chunk of its own."""
    heads, kv_heads, head_dim = shape.heads
    keys = jax.random.split(key, 4)
    num_pages = shape.batch * shape.max_pages
    queries = jax.random.normal(keys[0], (shape.batch * shape.rows, heads, head_dim), DTYPE)
    pages = (jax.random.normal(one, (num_pages, kv_heads, shape.page, head_dim), DTYPE) for one in keys[1:3])
    tables = jax.random.permutation(keys[3], num_pages).reshape(shape.batch, -1).astype(jnp.int32)
    starts = jnp.tile(jnp.asarray(first_visible(shape), jnp.int32), shape.batch)
    places = jnp.arange(shape.batch, dtype=jnp.int32) * shape.rows
    counts, first_rows = jnp.full(shape.batch, shape.rows), jnp.full(shape.batch, shape.length - shape.rows)
    return queries, *pages, tables, starts, places, counts.astype(jnp.int32), first_rows.astype(jnp.int32)


def exact(shape: Shape, row: jax.Array, *arrays: jax.Array) -> jax.Array:
    """One row of the result, in float32."""
    queries, key_pages, value_pages, tables, starts = arrays[:5]
    table = tables[row // shape.rows]
    keys, values = (pages[table].astype(jnp.float32) for pages in (key_pages, value_pages))
    length = shape.length - shape.rows + row % shape.rows + 1
    own = jnp.arange(table.shape[0], dtype=jnp.int32)[None]
    query = queries[row][None].astype(jnp.float32)
    scale = shape.heads.head_dim**-0.5
    return paged_attention_reference(query, keys, values, own, length[None], starts[row][None], scale=scale)


def measure(conditions: Conditions, report: Report) -> None:
    """Compile everything in parallel, then check and time one program after another and hand each row to `report`."""
    seed, selected = conditions.seed, list(programs(conditions.quick))
    shapes = list(dict.fromkeys(program.shape for program in selected))
    start = time.perf_counter()

    def build(shape: Shape, operation: Callable[..., jax.Array], *leading: jax.Array):
        described = jax.eval_shape(partial(arguments, shape), jax.random.key(0))
        return jax.jit(operation).lower(*leading, *described).compile()

    with ThreadPoolExecutor(12) as pool:
        references = dict(
            zip(shapes, pool.map(lambda s: build(s, partial(exact, s), jnp.int32(0)), shapes), strict=True)
        )
        compiled = list(pool.map(lambda program: build(program.shape, program.operation), selected))
    print(f"compiled {len(compiled)} programs in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    random = np.random.default_rng(seed)
    for shape in shapes:
        sets = [arguments(shape, jax.random.key(seed + index)) for index in range(2)]
        rows = np.sort(random.choice(shape.batch * shape.rows, CHECKED_ROWS, replace=False))
        expected = np.concatenate([references[shape](jnp.int32(row), *sets[0]) for row in rows]).astype(np.float64)
        last = np.arange(shape.length - shape.rows, shape.length)
        pairs = shape.batch * float((last - first_visible(shape) + 1).sum())
        operations = 4 * shape.heads.heads * shape.heads.head_dim * pairs
        labels = {"op": "chunk_attention", "n": shape.length, "batch": shape.batch, "rows": shape.rows}
        labels |= {"page": shape.page, "window": shape.window} | shape.heads._asdict() | {"dtype": DTYPE}
        for program, run in zip(selected, compiled, strict=True):
            if program.shape != shape:
                continue
            found = np.asarray(run(*sets[0])[rows], np.float64)
            error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
            if not error <= TOLERANCE:
                raise UniPrefillError(f"chunk_attention {program.backend} {shape}: relative error {error:.2e}")
            median = conditions.timer.milliseconds(run, sets, repeats=conditions.repeats)
            report(
                labels
                | {"backend": program.backend}
                | conditions.timing(median, operations=operations)
                | {"tflops": operations / median / 1e9, "relative_error": error}
            )
        del sets
