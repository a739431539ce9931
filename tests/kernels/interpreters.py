"""Running kernels in the CPU interpreters, with race detection and with NaN in all memory that nothing wrote."""

from contextlib import contextmanager

import numpy as np
from jax.experimental.pallas import mosaic_gpu as mgpu
from jax.experimental.pallas import tpu as pltpu

KERNELS = ("mosaic_gpu", "mosaic_tpu")


@contextmanager
def interpreted(backend: str, capfd):
    """Kernels traced inside run interpreted; fails on leaving if the interpreter reported a race."""
    if backend == "mosaic_gpu":
        mode = mgpu.force_gpu_interpret_mode(mgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"))
    else:
        mode = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"))
    with mode:
        yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def ragged_batch(random, lengths, *, heads, kv_heads, head_dim, window, padding, dtype):
    """Queries, keys and cu_seqlens; NaN in every row that belongs to no request."""
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    queries = random.normal(size=(len(lengths), window, heads, head_dim)).astype(dtype)
    keys = (2 * random.normal(size=(cu_seqlens[-1] + padding, kv_heads, head_dim))).astype(dtype)
    keys[cu_seqlens[-1] :] = np.nan
    for request, length in enumerate(lengths):
        queries[request, : max(0, window - length)] = np.nan
    return queries, keys, cu_seqlens
