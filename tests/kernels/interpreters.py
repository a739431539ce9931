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


def paged_batch(random, lengths, first_visible, *, heads, kv_heads, head_dim, page, dtype):
    """Queries, pools, page table, lengths and first rows; NaN in every row, and no page in every entry, that is not
    seen. Tables are wider than any request and pools larger than all of them."""
    visible = [range(first // page, -(-length // page)) for first, length in zip(first_visible, lengths, strict=True)]
    num_pages = sum(map(len, visible)) + 2
    free = iter(random.permutation(num_pages))
    table = np.full((len(lengths), -(-max(*lengths, 1) // page) + 1), np.iinfo(np.int32).max, np.int32)
    pools = [np.full((num_pages, kv_heads, page, head_dim), np.nan, dtype) for _ in range(2)]
    for request, columns in enumerate(visible):
        for column in columns:
            table[request, column] = own = next(free)
            rows = slice(max(first_visible[request] - column * page, 0), min(lengths[request] - column * page, page))
            for pool in pools:
                pool[own, :, rows] = random.normal(size=pool[own, :, rows].shape)
    queries = (2 * random.normal(size=(len(lengths), heads, head_dim))).astype(dtype)
    return queries, *pools, table, np.array(lengths, np.int32), np.array(first_visible, np.int32)
