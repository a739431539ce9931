"""The gated delta rule against its floor and its rivals, and the causal convolution before it.

Errors first, against the recurrence in float64 on fresh inputs, then device times of the whole operation and of what
Qwen3-Next does around it. A row's floor is the larger of its least bytes over the copy rate and its least matrix
operations over the product rate of the device. Where PyTorch and flash-linear-attention are installed, their forward
pass is timed on the same inputs in the same run (backend "flash_linear_attention").
"""

import statistics
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule import choose_backend, gated_delta_rule
from pallas_kernels.gated_delta_rule.api import Backend
from pallas_kernels.gated_delta_rule.chunks import CHUNK
from pallas_kernels.gated_delta_rule.shapes import QWEN3_NEXT_80B, SHAPES, Shape
from uniprefill_jax.bench.kernel_times.conditions import Conditions, Report, Row, cumulative_lengths
from uniprefill_jax.models.gated_delta_net import causal_conv

XLA_UP_TO = 65536  # rows: beyond, the chunked form takes seconds and says nothing new
ERROR_ROWS = 4096
CONVOLUTION_WIDTH = 4


def inputs(key: jax.Array, rows: int, slow: bool = False) -> tuple[jax.Array, ...]:
    """Queries, keys, values in bfloat16, log decay and strength."""
    heads, key_heads, key_dim, value_dim = QWEN3_NEXT_80B
    keys = jax.random.split(key, 5)
    sizes = ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim))
    packed = (jax.random.normal(k, (rows, *size), jnp.bfloat16) for k, size in zip(keys, sizes, strict=False))
    decay = jax.random.exponential(keys[3], (rows, heads)) * (5e-4 if slow else 0.1)
    return *packed, -decay, jax.random.uniform(keys[4], (rows, heads))


def errors(backend: Backend, seed: int) -> dict[str, float]:
    """Relative errors of outputs and states against the recurrence in float64, with fast and with slow decay."""
    found = {}
    for name, slow in (("fast_decay", False), ("slow_decay", True)):
        arrays = inputs(jax.random.key(seed), ERROR_ROWS, slow)
        cu = np.array([0, 1000, ERROR_ROWS], np.int32)
        outputs, states = jax.jit(partial(gated_delta_rule, backend=backend))(*arrays, cu)
        with jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(array.astype(jnp.float32)), jnp.float64) for array in arrays]
            expected, expected_states = jax.jit(_recurrence)(*wide, cu)
        for part, (one, other) in {"outputs": (outputs, expected), "states": (states, expected_states)}.items():
            one, other = np.asarray(one, np.float64), np.asarray(other)
            found[f"error_{part}_{name}"] = float(np.linalg.norm(one - other) / np.linalg.norm(other))
    return found


def _recurrence(queries, keys, values, log_decay, strength, cu_seqlens):
    """Row by row in the dtype of the inputs (the reference always computes in float32)."""
    ratio = values.shape[1] // keys.shape[1]

    def unit(x):
        return jnp.repeat(x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), ratio, axis=1)

    def advance(carry, row):
        state, states = carry
        number, query, key, value, gate, beta = row
        owner = jnp.searchsorted(cu_seqlens, number, side="right") - 1
        state = jnp.where(number == cu_seqlens[owner], 0, state) * jnp.exp(gate)[:, None, None]
        error = (value - (state * key[:, :, None]).sum(1)) * beta[:, None]
        state = state + key[:, :, None] * error[:, None, :]
        return (state, states.at[owner].set(state)), (state * query[:, :, None]).sum(1)

    state = jnp.zeros((values.shape[1], keys.shape[2], values.shape[2]), values.dtype)
    states = jnp.zeros((cu_seqlens.shape[0] - 1, *state.shape), values.dtype)
    numbers = jnp.arange(values.shape[0])
    rows = (numbers, unit(queries) * keys.shape[2] ** -0.5, unit(keys), values, log_decay, strength)
    (_, states), outputs = jax.lax.scan(advance, (state, states), rows)
    return outputs, states


def least_work(shape: Shape) -> tuple[float, float]:
    """Bytes and matrix operations that no chunked implementation goes without."""
    heads, key_heads, key_dim, value_dim = shape.heads
    moved = shape.rows * (2 * key_heads * key_dim + 2 * heads * value_dim) * 2 + shape.rows * heads * 8
    moved += shape.batch * heads * key_dim * value_dim * 4
    of_state = 3 * key_dim * value_dim  # state with keys and with queries, update
    of_chunk = CHUNK * (2 * value_dim + key_dim / (heads / key_heads) * 2)  # solve, attention, two products of rows
    return moved, 2.0 * shape.rows * heads * (of_state + of_chunk)


def time_torch(shape: Shape, repeats: int) -> float:
    """Median milliseconds of flash-linear-attention's forward pass on such inputs."""
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    heads, key_heads, key_dim, value_dim = shape.heads

    def draw(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        make = partial(torch.randn, device="cuda", generator=generator)
        q, k = (make(1, shape.rows, key_heads, key_dim).bfloat16() for _ in range(2))
        v, gate = make(1, shape.rows, heads, value_dim).bfloat16(), -0.1 * make(1, shape.rows, heads).abs()
        return q, k, v, gate, make(1, shape.rows, heads).sigmoid()

    cu = torch.tensor(cumulative_lengths(shape.batch, shape.rows // shape.batch), device="cuda", dtype=torch.long)

    def run(arrays):
        with torch.no_grad():
            return chunk_gated_delta_rule(
                *arrays,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=cu if shape.batch > 1 else None,
            )

    sets = [draw(seed) for seed in range(2)]
    run(sets[0])
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        blocker = torch.randn(8192, 8192, device="cuda").bfloat16()
        for _ in range(3):  # launches are queued behind it, so that no gap between them is timed
            blocker = blocker @ blocker * 1e-2
        start.record()
        for arrays in sets:
            run(arrays)
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / len(sets))
    return statistics.median(samples)


def measure(conditions: Conditions, report: Report) -> None:
    """Check the backends, then time one shape after another and hand each row to `report`."""
    seed, timer, kernel = conditions.seed, conditions.timer, choose_backend()
    backends: tuple[Backend, ...] = ("xla",) if kernel == "xla" else (kernel, "xla")
    error_of = {backend: errors(backend, seed) for backend in backends}
    for shape in SHAPES:
        if conditions.quick and (shape.rows > 8192 or shape.batch > 1):
            continue
        cu = jnp.asarray(cumulative_lengths(shape.batch, shape.rows // shape.batch))
        sets = [(*inputs(jax.random.key(seed + i), shape.rows), cu) for i in range(3)]
        moved, operations = least_work(shape)
        names = dict(zip(("heads", "kv_heads", "head_dim"), shape.heads, strict=False))
        labels = {"op": "gated_delta_rule", "n": shape.rows, "batch": shape.batch, **names, "dtype": "bfloat16"}
        medians: dict[str, float] = {}
        for backend in backends:
            if backend == "xla" and shape.rows > XLA_UP_TO:
                continue
            program = jax.jit(partial(gated_delta_rule, backend=backend)).lower(*sets[0]).compile()
            medians[backend] = timer.milliseconds(program, sets, repeats=conditions.repeats)
        if timer.on_accelerator and find_spec("torch") and find_spec("fla"):
            medians["flash_linear_attention"] = time_torch(shape, conditions.repeats)
        for name, median in medians.items():
            timing = conditions.timing(median, moved=moved, operations=operations)
            report(labels | {"backend": name} | timing | error_of.get(name, {}))
        if shape.batch == 1:
            report(_convolution_row(conditions, shape))


def _convolution_row(conditions: Conditions, shape: Shape) -> Row:
    """The causal convolution and its activation, split into queries, keys and values."""
    heads, key_heads, key_dim, value_dim = shape.heads
    ends = (key_heads * key_dim, 2 * key_heads * key_dim)
    channels = ends[1] + heads * value_dim

    def convolve(x, weight, row_start):
        return jnp.split(jax.nn.silu(causal_conv(x, weight, row_start)), ends, axis=-1)

    def arguments(key):
        first, second = jax.random.split(key)
        x = jax.random.normal(first, (shape.rows, channels), jnp.bfloat16)
        weight = jax.random.normal(second, (CONVOLUTION_WIDTH, channels), jnp.bfloat16)
        return x, weight, jnp.zeros((shape.rows,), jnp.int32)

    sets = [arguments(jax.random.key(conditions.seed + i)) for i in range(2)]
    program = jax.jit(convolve).lower(*sets[0]).compile()
    median = conditions.timer.milliseconds(program, sets, repeats=conditions.repeats)
    labels = {"op": "causal_conv_silu", "n": shape.rows, "batch": 1, "dtype": "bfloat16", "backend": "xla"}
    return labels | conditions.timing(median, moved=4 * shape.rows * channels)
