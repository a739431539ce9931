"""Causal attention over row ranges: the kernel and cuDNN.

For every shape, on fresh random inputs: the relative error of some rows against float64 and the device time. A row's
floor is the matrix operations that its visible pairs need over the product rate of the device. Without a kernel for the
device, short inputs run on the reference, which shows that the benchmark works and nothing else.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.causal_attention import causal_attention, choose_backend
from pallas_kernels.causal_attention.shapes import SHAPES, Shape
from uniprefill_jax.bench.kernel_times.conditions import Conditions, Report, cumulative_lengths

DTYPE = "bfloat16"
CHECKED_ROWS = 8
REFERENCE_ROWS = 1024


class Case(NamedTuple):
    """One row to measure."""

    shape: Shape
    backend: str
    operation: Callable[..., jax.Array]


def ranges(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """First visible row of every row, and cumulative lengths of the requests."""
    cu_seqlens = cumulative_lengths(shape.batch, shape.rows // shape.batch)
    start = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    if shape.window is not None:
        start = np.maximum(start, np.arange(shape.rows) - shape.window + 1)
    return start.astype(np.int32), cu_seqlens


def kernel_case(shape: Shape) -> Case:
    """The kernel that "auto" picks here."""
    backend = choose_backend(**shape.heads._asdict(), dtype=DTYPE)
    scale = shape.heads.head_dim**-0.5
    count = shape.rows

    def operation(queries, keys, values, row_start):
        return causal_attention(queries, keys, values, row_start, count, scale=scale, backend=backend)

    return Case(shape, backend, operation)


def cudnn_case(shape: Shape) -> Case | None:
    """The same through cuDNN; None for windows of packed requests, which it does not take."""
    scale = shape.heads.head_dim**-0.5
    if shape.batch > 1:
        if shape.window is not None:
            return None
        # Packed requests have no public name in jax; padded ones are slower where lengths differ.
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        cu_seqlens = ranges(shape)[1]
        offsets, lengths = jnp.asarray(cu_seqlens)[None], jnp.asarray(np.diff(cu_seqlens))[None]

        def packed(queries, keys, values, row_start):
            outputs = cudnn.dot_product_attention(
                queries[None],
                keys[None],
                values[None],
                q_seqlen=lengths,
                kv_seqlen=lengths,
                q_offsets=offsets,
                kv_offsets=offsets,
                scale=scale,
                mask_type=cudnn.MaskType.PADDING_CAUSAL,
            )
            return jnp.asarray(outputs)[0]

        return Case(shape, "cudnn", packed)
    window = None if shape.window is None else (shape.window - 1, 0)

    def single(queries, keys, values, row_start):
        return jax.nn.dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            scale=scale,
            is_causal=True,
            local_window_size=window,
            implementation="cudnn",
        )[0]

    return Case(shape, "cudnn", single)


def arguments(shape: Shape, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random queries, keys and values, and the first visible rows."""
    heads, kv_heads, head_dim = shape.heads
    keys = jax.random.split(key, 3)
    arrays = (
        jax.random.normal(one, (shape.rows, h, head_dim), DTYPE)
        for one, h in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )
    return *arrays, jnp.asarray(ranges(shape)[0])


def exact(inputs: tuple[jax.Array, ...], rows: np.ndarray, scale: float) -> np.ndarray:
    """Some rows of the result in float64."""
    chosen = np.asarray(inputs[0][rows], np.float64)
    keys, values = (np.asarray(array.swapaxes(0, 1), np.float64) for array in inputs[1:3])
    starts = np.asarray(inputs[3])
    outputs = []
    for query, row in zip(chosen, rows, strict=True):
        seen = slice(starts[row], row + 1)
        scores = scale * query.reshape(len(keys), -1, query.shape[1]) @ keys[:, seen].swapaxes(1, 2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append((weights / weights.sum(-1, keepdims=True) @ values[:, seen]).reshape(query.shape))
    return np.array(outputs)


def cases(quick: bool) -> list[Case]:
    """Everything to measure."""
    if choose_backend() == "reference":
        short = dict.fromkeys(shape._replace(rows=REFERENCE_ROWS) for shape in SHAPES)
        return [kernel_case(shape) for shape in short]
    selected = [shape for shape in SHAPES if not quick or shape.rows <= 8192]
    both = [case for shape in selected for case in (kernel_case(shape), cudnn_case(shape))]
    return [case for case in both if case is not None]


def measure(conditions: Conditions, report: Report) -> None:
    """Compile everything in parallel, then check and time one case after another and hand each row to `report`."""
    seed, selected = conditions.seed, cases(conditions.quick)
    start = time.perf_counter()

    def build(case: Case):
        shapes = jax.eval_shape(lambda key: arguments(case.shape, key), jax.random.key(0))
        return jax.jit(case.operation).lower(*shapes).compile()

    with ThreadPoolExecutor(12) as pool:
        programs = list(pool.map(build, selected))
    print(f"compiled {len(programs)} programs in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    random = np.random.default_rng(seed)
    for shape in dict.fromkeys(case.shape for case in selected):
        sets = [arguments(shape, jax.random.key(seed + index)) for index in range(2)]
        rows = np.sort(random.choice(shape.rows, CHECKED_ROWS, replace=False))
        expected = exact(sets[0], rows, shape.heads.head_dim**-0.5)
        pairs = float((np.arange(shape.rows) - ranges(shape)[0] + 1).sum())
        operations = 4 * shape.heads.heads * shape.heads.head_dim * pairs
        labels = {"op": "causal_attention", "n": shape.rows // shape.batch, "batch": shape.batch}
        labels |= shape.heads._asdict() | {"window": shape.window, "dtype": DTYPE}
        for case, program in zip(selected, programs, strict=True):
            if case.shape != shape:
                continue
            found = np.asarray(program(*sets[0])[rows], np.float64)
            median = conditions.timer.milliseconds(program, sets, repeats=conditions.repeats)
            report(
                labels
                | {"backend": case.backend}
                | conditions.timing(median, operations=operations)
                | {"tflops": operations / median / 1e9}
                | {"relative_error": float(np.linalg.norm(found - expected) / np.linalg.norm(expected))}
            )
