"""chunk_attention against float64: the reference, the kernel interpreted and on a Hopper GPU; nobody's rows are NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_score.shapes import FAMILIES, SMOLLM2_135M
from pallas_kernels.causal_attention.gpu_flash import Tiling
from pallas_kernels.chunk_attention import ChunkRows, choose_backend, chunk_attention
from pallas_kernels.chunk_attention.gpu import chunk_attention_mosaic_gpu
from pallas_kernels.chunk_attention.rows import ALIGNMENT
from pallas_kernels.platform import kernels_of
from tests.kernels.interpreters import KERNELS, interpreted

needs_hopper = pytest.mark.skipif(kernels_of() != "mosaic_gpu", reason="needs a GPU of compute capability 9.0")


def paged_chunk(random, requests, *, heads, kv_heads, head_dim, page, dtype, window=None, kept=1.0, padding=0):
    """Arguments of `chunk_attention` for (first row, count) of every request. The window counts positions, of which a
    share was kept. A request of which nothing is there has a count of 0; what is nobody's holds junk.
    """
    aligned = [-(-count // ALIGNMENT) * ALIGNMENT for _, count in requests]
    places = [0, *np.cumsum(aligned[:-1]).tolist()]
    num_rows = max(place + count for place, (_, count) in zip(places, requests, strict=True)) + padding
    needed = [-(-(first + count) // page) for first, count in requests]
    num_pages = sum(needed) + 2
    free = iter(random.permutation(num_pages))
    tables = np.full((len(requests), max(needed) + 1), num_pages, np.int32)
    queries = np.full((num_rows, heads, head_dim), np.nan)
    starts = random.integers(0, 9999, num_rows)
    pools = [np.full((num_pages, kv_heads, page, head_dim), np.nan) for _ in range(2)]
    for request, (first, count) in enumerate(requests):
        length = first + count
        for column in range(needed[request]):
            tables[request, column] = own = next(free)
            rows = slice(0, min(length - column * page, page))
            for pool in pools:
                pool[own, :, rows] = random.normal(size=pool[own, :, rows].shape)
        positions = np.sort(random.permutation(int(length / kept))[:length])
        reach = np.zeros(length) if window is None else positions - window + 1
        own = slice(places[request], places[request] + count)
        starts[own] = np.searchsorted(positions, reach)[first:]
        queries[own] = 2 * random.normal(size=queries[own].shape)
    rows = ChunkRows(*(np.array(part, np.int32) for part in (places, *np.array(requests)[:, ::-1].T)))
    return queries.astype(dtype), *(pool.astype(dtype) for pool in pools), tables, starts.astype(np.int32), rows


def agrees_with_float64(found, arguments, scale, error, checked):
    """Relative error over some rows of every request below `error`, zeros in padding, no NaN."""
    queries, keys, values, tables, starts, rows = arguments
    found = np.asarray(found, np.float64)
    padding = np.ones(len(found), bool)
    outputs, exact = [], []
    for request, (place, count, first) in enumerate(zip(*rows, strict=True)):
        padding[place : place + count] = False
        for number in np.unique(np.linspace(0, count - 1, checked).astype(int)) if count else []:
            seen = np.arange(starts[place + number], first + number + 1)
            ids = tables[request, seen // keys.shape[2]]
            key, value = (np.asarray(pages, np.float64)[ids, :, seen % keys.shape[2]] for pages in (keys, values))
            query = np.asarray(queries[place + number], np.float64).reshape(key.shape[1], -1, key.shape[2])
            weights = np.exp(scale * np.einsum("kgd,tkd->kgt", query, key))
            exact.append(np.einsum("kgt,tkd->kgd", weights / weights.sum(-1, keepdims=True), value).reshape(-1))
            outputs.append(found[place + number].reshape(-1))
    assert np.linalg.norm(np.array(outputs) - exact) <= error * np.linalg.norm(exact)
    assert not found[padding].any()


@settings(max_examples=8)
@given(
    requests=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 300)), max_size=4),
    padding=st.integers(0, 70),
    heads=st.sampled_from([(6, 2), (3, 1)]),
    page=st.sampled_from([16, 64, 256]),
    window=st.sampled_from([None, 1, 40, 400]),
    kept=st.sampled_from([1.0, 0.4]),
)
def test_reference_agrees_with_float64(requests, padding, heads, page, window, kept):
    random = np.random.default_rng(len(requests) + padding)
    shape = dict(heads=heads[0], kv_heads=heads[1], head_dim=8, page=page, dtype=np.float32)
    requests = [*requests, (5, 9), (0, 0)]
    arguments = paged_chunk(random, requests, window=window, kept=kept, padding=padding, **shape)
    found = jax.jit(lambda *a: chunk_attention(*a, scale=0.3, backend="reference"))(*arguments)
    agrees_with_float64(found, arguments, 0.3, 1e-5, 20)


INTERPRETED = [
    # Two requests, one between them that has left and one that is not there; pages of half a step, ends within one.
    ([(70, 150), (90, 0), (0, 3), (0, 0)], (2, 1, 64), 64, Tiling(2, 128, 2), dict(padding=40), 0.125),
    # A page holds more than a step; a window after a drop; a negative scale.
    ([(200, 64)], (1, 1, 128), 128, Tiling(2, 64, 2), dict(window=90, kept=0.5), -0.1),
]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("requests", "heads", "page", "tiling", "ranges", "scale"), INTERPRETED)
def test_kernels_interpreted(backend, requests, heads, page, tiling, ranges, scale, capfd):
    shape = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True), page=page, dtype=jnp.bfloat16)
    arguments = paged_chunk(np.random.default_rng(1), requests, **shape, **ranges)

    def run(*arguments):
        if backend == "mosaic_gpu":
            return chunk_attention_mosaic_gpu(*arguments, scale=scale, tiling=tiling, interpretable=True)
        return chunk_attention(*arguments, scale=scale, backend=backend)

    with interpreted(backend, capfd):
        found = jax.block_until_ready(jax.jit(run)(*arguments))
    agrees_with_float64(found, arguments, scale, 4e-3, 40)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("heads", [*FAMILIES, SMOLLM2_135M])
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize(
    ("requests", "ranges"),
    [
        ([(1500, 1000)], dict(padding=24)),
        ([(0, 130), (77, 0), (1200, 1), (333, 500), (0, 0)], dict(window=300, kept=0.5)),
    ],
)
def test_on_gpu(heads, page, requests, ranges):
    random = np.random.default_rng(page)
    arguments = paged_chunk(random, requests, **heads._asdict(), page=page, dtype=jnp.bfloat16, **ranges)
    scale = heads.head_dim**-0.5
    run = jax.jit(lambda *a: chunk_attention(*a, scale=scale, backend="mosaic_gpu"))
    found, again = (np.asarray(run(*arguments), np.float32) for _ in range(2))
    agrees_with_float64(found, arguments, scale, 4e-3, 30)
    np.testing.assert_array_equal(found, again)


def test_automatic_choice():
    assert choose_backend(platform="cpu") == "reference"
    assert choose_backend(platform="tpu") == "mosaic_tpu"
    assert choose_backend(platform="tpu", page=8) == "reference"


def test_shapes_that_do_not_fit():
    pages, one = jnp.zeros((4, 2, 16, 64)), jnp.zeros(1, jnp.int32)
    fits = (jnp.zeros((2, 4, 64)), pages, pages, jnp.zeros((1, 3), jnp.int32), jnp.zeros(2, jnp.int32))
    wrong = {0: jnp.zeros((2, 3, 64)), 1: pages[:2], 3: jnp.zeros((2, 3), jnp.int32), 4: jnp.zeros(3, jnp.int32)}
    for place, array in wrong.items():
        arguments = [array if number == place else right for number, right in enumerate(fits)]
        with pytest.raises(ValueError, match="chunk_attention"):
            chunk_attention(*arguments, ChunkRows(one, one, one), scale=1.0)
    for backend, names in (("mosaic_gpu", "dtype is float32"), ("triton", "use 'auto'")):
        with pytest.raises(ValueError, match=names):
            chunk_attention(*fits, ChunkRows(one, one, one), scale=1.0, backend=backend)
