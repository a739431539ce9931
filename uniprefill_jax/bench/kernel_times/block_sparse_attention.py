"""Block-sparse attention of random blocks, beside dense attention of the same inputs through cuDNN.

For every shape, on fresh random inputs: the relative error of some rows against float32, and the device time, the
packing of masks and the gathering of columns included. A row's floor is the matrix operations that its visible pairs
need over the product rate of the device; `share_of_dense_rate` is operations per second over those of cuDNN's dense
attention. Masks are drawn block by block and head by head, which is as hard on the caches as it gets. Without a kernel
for the device, short inputs run on the reference, which shows that the benchmark works and nothing else.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_sparse_attention import block_sparse_attention, choose_backend
from pallas_kernels.block_sparse_attention.blocks import Blocks
from pallas_kernels.block_sparse_attention.shapes import SHAPES, Shape
from pallas_kernels.causal_attention import shapes as dense_shapes
from uniprefill_jax.bench.kernel_times.causal_attention import cudnn_case
from uniprefill_jax.bench.kernel_times.conditions import Conditions, Report, Row, cumulative_lengths
from uniprefill_jax.errors import UniPrefillError

DTYPE = "bfloat16"
TOLERANCE = 4e-3  # rounding outputs to bfloat16 alone is 1.7e-3, weights another 1e-3
CHECKED_ROWS = 8
REFERENCE_ROWS = 512


class Program(NamedTuple):
    """One row to measure: of sparse attention, or dense attention of the same inputs."""

    shape: Shape
    backend: str
    operation: Callable[..., jax.Array]


def programs(quick: bool) -> list[Program]:
    """Everything to measure, dense attention before the sparse one of the same inputs."""
    shapes = [shape for shape in SHAPES if not quick or shape.rows <= 32768]
    on_reference = choose_backend() == "reference"
    if on_reference:
        short = (shape._replace(rows=REFERENCE_ROWS, columns=min(shape.columns, 64)) for shape in SHAPES)
        shapes = list(dict.fromkeys(short))
    found = {}
    for shape in sorted(shapes, key=_inputs):
        dense = cudnn_case(dense_shapes.Shape(shape.heads, shape.rows, shape.batch))
        if dense is not None and not on_reference:
            whole = shape._replace(density=1.0, block_size=128, columns=0)
            found.setdefault(whole, Program(whole, "cudnn", partial(_dense, dense.operation)))
        found[shape] = _sparse(shape)
    return list(found.values())


def _inputs(shape: Shape) -> Any:
    return shape.heads, shape.rows, shape.batch


def _dense(operation: Callable[..., jax.Array], queries, keys, values, *_) -> jax.Array:
    return operation(queries, keys, values, None)


def _sparse(shape: Shape) -> Program:
    backend = choose_backend(**shape.heads._asdict(), block_size=shape.block_size, dtype=DTYPE)
    options = {"block_size": shape.block_size, "scale": shape.heads.head_dim**-0.5, "backend": backend}
    return Program(shape, backend, partial(block_sparse_attention, **options))


@partial(jax.jit, static_argnums=0)
def arguments(shape: Shape, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random queries, keys, values and blocks, and where there are any columns."""
    heads, kv_heads, head_dim = shape.heads
    keys = jax.random.split(key, 5)
    arrays = (
        jax.random.normal(one, (shape.rows, h, head_dim), DTYPE)
        for one, h in zip(keys[:3], (heads, kv_heads, kv_heads), strict=True)
    )
    cu_seqlens = jnp.asarray(cumulative_lengths(shape.batch, shape.rows // shape.batch))
    count = Blocks.of_requests(cu_seqlens, shape.rows, shape.block_size).filled.shape[0]
    found = (*arrays, cu_seqlens, jax.random.bernoulli(keys[3], shape.density, (heads, count, count)))
    if not shape.columns:
        return found

    def draw(key):
        places = jax.vmap(lambda one: jax.random.permutation(one, shape.rows // shape.batch))
        return jnp.sort(places(jax.random.split(key, shape.batch))[:, : shape.columns], axis=-1)

    return *found, jax.lax.map(draw, jax.random.split(keys[4], heads)).astype(jnp.int32)


def exact(shape: Shape, row: jax.Array, *inputs: jax.Array) -> jax.Array:
    """One row of the result, in float32."""
    queries, keys, values, cu_seqlens, mask, *columns = inputs
    blocks = Blocks.of_requests(cu_seqlens, shape.rows, shape.block_size)
    place = jnp.arange(shape.rows, dtype=jnp.int32)
    request = jnp.searchsorted(cu_seqlens[1:], row, side="right")
    first = cu_seqlens[request]
    block = blocks.cu_blocks[request] + (place - first) // shape.block_size
    own = block[row]
    visible = mask[:, own][:, block] | (block == own)
    if columns:
        visible |= jax.vmap(lambda at: jnp.zeros(shape.rows, bool).at[at].set(True))(first + columns[0][:, request])
    visible &= (place >= first) & (place <= row)
    query = queries[row].reshape(keys.shape[1], -1, queries.shape[2]).astype(jnp.float32)
    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = product("kgd,tkd->kgt", query, keys.astype(jnp.float32)) * queries.shape[2] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible.reshape(scores.shape), scores, -jnp.inf), axis=-1)
    output = product("kgt,tkd->kgd", weights, values.astype(jnp.float32))
    return output.reshape(queries.shape[1:])


@partial(jax.jit, static_argnums=0)
def visible_pairs(shape: Shape, cu_seqlens: jax.Array, mask: jax.Array, *columns: jax.Array) -> jax.Array:
    """Pairs of rows of each head and block of query rows."""
    blocks = Blocks.of_requests(cu_seqlens, shape.rows, shape.block_size)
    block = jnp.arange(mask.shape[1])
    earlier = (block < block[:, None]) & (block >= blocks.first[:, None])
    pairs = (mask & earlier).sum(axis=-1) * shape.block_size + (blocks.filled + 1) / 2
    if columns:
        at = (blocks.cu_blocks[:-1, None] + columns[0] // shape.block_size)[:, blocks.owner]
        single = (at < block[:, None]) & ~jnp.take_along_axis(mask, at, axis=2)
        pairs += single.sum(axis=-1)
    return pairs * blocks.filled


def measure(conditions: Conditions, report: Report) -> None:
    """Compile everything in parallel, then check and time one program after another and hand each row to `report`."""
    seed, selected = conditions.seed, programs(conditions.quick)
    start = time.perf_counter()

    def build(shape: Shape, operation: Callable[..., jax.Array], *leading: jax.Array):
        described = jax.eval_shape(partial(arguments, shape), jax.random.key(0))
        return jax.jit(operation).lower(*leading, *described).compile()

    def both(program: Program):
        check = build(program.shape, partial(exact, program.shape), jnp.int32(0))
        return check, build(program.shape, program.operation)

    with ThreadPoolExecutor(12) as pool:
        compiled = list(pool.map(both, selected))
    print(f"compiled {len(compiled)} programs in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    random = np.random.default_rng(seed)
    dense_rate = None
    for program, (check, run) in zip(selected, compiled, strict=True):
        shape = program.shape
        sets = [arguments(shape, jax.random.key(seed + index)) for index in range(2)]
        rows = np.sort(random.choice(shape.rows, CHECKED_ROWS, replace=False))
        expected = np.stack([check(jnp.int32(row), *sets[0]) for row in rows]).astype(np.float64)
        found = np.asarray(run(*sets[0])[rows], np.float64)
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        if not error <= TOLERANCE:
            raise UniPrefillError(f"block_sparse_attention {program.backend} {shape}: relative error {error:.2e}")
        pairs = np.mean([np.asarray(visible_pairs(shape, *one[3:]), np.float64).sum() for one in sets])
        operations = 4 * shape.heads.head_dim * float(pairs)
        median = conditions.timer.milliseconds(run, sets, repeats=conditions.repeats)
        rate = operations / median / 1e9
        if program.backend == "cudnn":
            dense_rate = rate
        row: Row = {"op": "block_sparse_attention", "n": shape.rows // shape.batch, "batch": shape.batch}
        row |= shape.heads._asdict() | {"block_size": shape.block_size, "density": shape.density}
        row |= {"columns": shape.columns, "dtype": DTYPE, "backend": program.backend}
        row |= conditions.timing(median, operations=operations) | {"tflops": rate, "relative_error": error}
        report(row | ({} if dense_rate is None else {"share_of_dense_rate": rate / dense_rate}))
        del sets
