"""Grouped matrix products against XLA's dense product.

Every row is checked before it is timed: rows around group boundaries against float32 products at full precision, and
the rest for finite numbers. `dense_tflops` is XLA's plain product of the same operations in the same run (of rows x
[inner, columns], [inner, 2 columns] where two products are fused). A row's floor is the larger of its least bytes over
the copy rate and its operations over the product rate. Backend `xla_sliced` is what a model does without the kernel:
cut one matrix out of the stack, then multiply.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import choose_backend, grouped_gated_matmul, grouped_matmul
from pallas_kernels.grouped_matmul.reference import ACTIVATIONS
from pallas_kernels.grouped_matmul.shapes import SHAPES, Routing, Shape
from uniprefill_jax.bench.kernel_times.conditions import Conditions, Report
from uniprefill_jax.errors import UniPrefillError

TOLERANCE = 4e-3  # relative, of bfloat16 results
CHECKED_ROWS = 1024
SMALL_SHAPES = [Shape(512, 128, 128, 8, 16, gated=True), Shape(512, 128, 128, 8, 16), Shape(256, 128, 128, 1, 2)]


def routed_sizes(random: np.random.Generator, shape: Shape, routing: Routing) -> np.ndarray:
    """Rows per group. Zipf: shares fall as 1/rank, in random order; none above a tenth, all that ten of a row allow."""
    if routing == "single":
        return np.array([shape.rows], np.int32)
    shares = np.ones(shape.groups)
    if routing == "zipf":
        shares = random.permutation(1 / np.arange(1, shape.groups + 1))
        shares = np.minimum(shares / shares.sum(), 0.1)
    return random.multinomial(shape.rows, shares / shares.sum()).astype(np.int32)


def arguments(key: jax.Array, shape: Shape, sizes: np.ndarray) -> tuple[Any, ...]:
    """Random rows and weights, sizes, and the last groups of the stack."""
    keys = jax.random.split(key, 3)
    draw = jax.jit(lambda k, s: jax.random.normal(k, s, jnp.bfloat16), static_argnums=1)
    stack = (shape.stacked, shape.inner, shape.columns)
    weights = [draw(k, stack) for k in keys[1 : 2 + shape.gated]]
    rows = draw(keys[0], (shape.rows, shape.inner))
    return rows, *weights, jnp.asarray(sizes), jnp.int32(shape.stacked - shape.groups)


def operation(shape: Shape, backend: str) -> Callable[..., jax.Array]:
    """The product of one shape as a function of `arguments`."""
    if backend == "xla_sliced":

        def sliced(rows, weights, sizes, first):
            del sizes
            return jnp.dot(rows, jax.lax.dynamic_index_in_dim(weights, first, 0, keepdims=False))

        return sliced
    if shape.gated:
        gated = partial(grouped_gated_matmul, activation="silu", backend=backend)  # pyright: ignore[reportArgumentType]
        return lambda rows, gate, up, sizes, first: gated(rows, gate, up, sizes, first_group=first)
    plain = partial(grouped_matmul, backend=backend)  # pyright: ignore[reportArgumentType]
    return lambda rows, weights, sizes, first: plain(rows, weights, sizes, first_group=first)


def relative_error(random: np.random.Generator, result: jax.Array, values: tuple[Any, ...], sizes: np.ndarray) -> float:
    """Error of the rows around group boundaries, of the norm of what they should be."""
    rows, *weights, _, first = values
    ends = np.cumsum(sizes)
    near = random.choice(ends, CHECKED_ROWS // 8)[:, None] + np.arange(-4, 4)
    picked = np.unique(np.clip(near, 0, ends[-1] - 1))
    picked = np.union1d(picked, random.integers(0, ends[-1], 64))
    groups = np.searchsorted(ends, picked, side="right") + int(first)

    def expected(rows, *weights):
        taken = rows[picked].astype(jnp.float32)

        def product(array):
            if len(sizes) == 1:
                return jnp.dot(taken, array[groups[0]].astype(jnp.float32), precision="highest")
            return jnp.einsum("mk,mkn->mn", taken, array[groups].astype(jnp.float32), precision="highest")

        products = [product(array) for array in weights]
        return products[0] if len(products) == 1 else ACTIVATIONS["silu"](products[0]) * products[1]

    exact = np.asarray(jax.jit(expected)(rows, *weights), np.float64)
    found = np.asarray(result[picked], np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def labels(shape: Shape, routing: Routing, backend: str) -> dict[str, Any]:
    """What names a row of the result."""
    op = "grouped_gated_matmul" if shape.gated else "grouped_matmul"
    sizes = {"n": shape.rows, "inner": shape.inner, "columns": shape.columns}
    sizes |= {"groups": shape.groups, "stacked": shape.stacked}
    return {"op": op, **sizes, "routing": routing, "dtype": "bfloat16", "backend": backend}


def least_bytes(shape: Shape) -> float:
    """Bytes of rows, outputs and all matrices, each moved once."""
    matrices = shape.groups * (1 + shape.gated) * shape.inner * shape.columns
    return 2.0 * (shape.rows * (shape.inner + shape.columns) + matrices)


def measure(conditions: Conditions, report: Report) -> None:
    """Compile everything in parallel, then check and time one shape after another and hand each row to `report`."""
    random = np.random.default_rng(conditions.seed)
    kernel, shapes = choose_backend(), SMALL_SHAPES if conditions.quick else SHAPES
    timer, repeats = conditions.timer, conditions.repeats

    def build(shape: Shape, backend: str):
        values = jax.eval_shape(lambda: arguments(jax.random.key(0), shape, np.zeros(shape.groups, np.int32)))
        return jax.jit(operation(shape, backend)).lower(*values).compile()

    wanted = [(shape, backend) for shape in shapes for backend in [kernel] + ["xla_sliced"] * (shape.groups == 1)]
    with ThreadPoolExecutor(12) as pool:
        programs = dict(zip(wanted, pool.map(lambda item: build(*item), wanted), strict=True))
    for shape in shapes:
        operations = 2.0 * shape.rows * shape.inner * shape.columns * (1 + shape.gated)
        routings: tuple[Routing, ...] = ("single",) if shape.groups == 1 else ("uniform", "zipf")
        dense_ms = None
        for routing in routings:
            sizes = routed_sizes(random, shape, routing)
            values = arguments(jax.random.key(conditions.seed), shape, sizes)
            if dense_ms is None:
                joined = jnp.concatenate([array[0] for array in values[1:-2]], axis=1)
                dense_ms = timer.milliseconds(jax.jit(jnp.dot), [(values[0], joined)], repeats=repeats)
            for backend in (item[1] for item in wanted if item[0] == shape):
                program = programs[shape, backend]
                result = program(*values)
                error = relative_error(random, result, values, sizes)
                if not (error < TOLERANCE and bool(jnp.isfinite(result).all())):
                    raise UniPrefillError(f"{labels(shape, routing, backend)}: relative error {error:.2e}")
                del result
                median = timer.milliseconds(program, [values], repeats=repeats)
                report(
                    labels(shape, routing, backend)
                    | conditions.timing(median, moved=least_bytes(shape), operations=operations)
                    | {"tflops": operations / median / 1e9, "dense_tflops": operations / dense_ms / 1e9}
                    | {"share_of_dense": dense_ms / median, "relative_error": error}
                )
