"""Grouped matrix products against XLA's dense product: python -m benchmarks.grouped_matmul --json PATH [--quick].

Every row is checked before it is timed: rows around group boundaries against float32 products at full precision, and
the rest for finite numbers. `dense_tflops` is XLA's plain product of the same operations in the same run (of rows x
[K, N], [K, 2 N] where two products are fused). A row's floor is the larger of its least bytes over the copy rate and
its operations over the product rate in benchmarks.kernels.CEILINGS. Backend `xla_sliced` is what a model does without
the kernel: cut one matrix out of the stack, then multiply.
"""

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import CEILINGS
from benchmarks.kernels_timing import DeviceTimer
from pallas_kernels.grouped_matmul import choose_backend, grouped_gated_matmul, grouped_matmul
from pallas_kernels.grouped_matmul.reference import ACTIVATIONS
from pallas_kernels.grouped_matmul.shapes import SHAPES, Routing, Shape

TOLERANCE = 4e-3  # relative, of bfloat16 results
CHECKED_ROWS = 1024


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
    sizes = {"m": shape.rows, "k": shape.inner, "n": shape.columns, "groups": shape.groups, "stacked": shape.stacked}
    return {"op": op, **sizes, "routing": routing, "dtype": "bfloat16", "backend": backend}


def floor_ms(shape: Shape, operations: float) -> float | None:
    """Least milliseconds on this device, or None where its rates were never measured."""
    rates = CEILINGS.get(jax.devices()[0].device_kind)
    if rates is None:
        return None
    matrices = shape.groups * (1 + shape.gated) * shape.inner * shape.columns
    least = 2 * (shape.rows * (shape.inner + shape.columns) + matrices)
    return max(least / rates[0], operations / rates[1]) * 1e3


def measure(timer: DeviceTimer, shapes: list[Shape], seed: int, repeats: int, report: Callable[[dict], None]) -> None:
    """Compile everything in parallel, then check and time one shape after another and hand each row to `report`."""
    random = np.random.default_rng(seed)
    kernel = choose_backend()

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
            values = arguments(jax.random.key(seed), shape, sizes)
            if dense_ms is None:
                joined = jnp.concatenate([array[0] for array in values[1:-2]], axis=1)
                dense_ms = timer.milliseconds(jax.jit(jnp.dot), [(values[0], joined)], repeats=repeats)
            for backend in (item[1] for item in wanted if item[0] == shape):
                program = programs[shape, backend]
                result = program(*values)
                error = relative_error(random, result, values, sizes)
                if not (error < TOLERANCE and bool(jnp.isfinite(result).all())):
                    raise SystemExit(f"{labels(shape, routing, backend)}: relative error {error:.2e}")
                del result
                median = timer.milliseconds(program, [values], repeats=repeats)
                floor = floor_ms(shape, operations)
                report(
                    labels(shape, routing, backend)
                    | {"median_ms": median, "floor_ms": floor, "share_of_floor": floor and floor / median}
                    | {"tflops": operations / median / 1e9, "dense_tflops": operations / dense_ms / 1e9}
                    | {"share_of_dense": dense_ms / median, "relative_error": error}
                )


def main() -> None:
    """Check, measure, and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--quick", action="store_true", help="one small shape of each kind")
    options = parser.parse_args()
    seed = time.time_ns() % (1 << 31)
    small = [Shape(512, 128, 128, 8, 16, gated=True), Shape(512, 128, 128, 8, 16), Shape(256, 128, 128, 1, 2)]
    report: dict[str, Any] = {
        "command": "python -m benchmarks.grouped_matmul" + (" --quick" if options.quick else ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": getattr(jax.devices()[0], "device_kind", platform.machine()),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": version("jaxlib")},
        "seed": seed,
        "rows": [],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def add(row: dict[str, Any]) -> None:
        report["rows"].append(row)
        options.json.write_text(json.dumps(report, indent=1) + "\n")  # after every row: a cut run keeps what it has
        print(json.dumps(row), file=sys.stderr, flush=True)

    measure(DeviceTimer(), small if options.quick else list(SHAPES), seed, 3 if options.quick else 5, add)


if __name__ == "__main__":
    main()
