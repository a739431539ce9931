"""Block-sparse attention against a loop over rows in float64 numpy: ragged, grouped heads, with and without columns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_score.shapes import FAMILIES, SMOLLM2_135M
from pallas_kernels.block_sparse_attention import block_sparse_attention, choose_backend
from pallas_kernels.block_sparse_attention.gpu import block_sparse_attention_mosaic_gpu
from pallas_kernels.platform import kernels_of
from tests.kernels.interpreters import KERNELS, interpreted


def batch(lengths, padding, heads, head_dim, size, columns, dtype, *, density=0.3, seed=8):
    """Arguments of `block_sparse_attention`; rows of no request hold NaN, and masks more than fits or is visible."""
    random = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    rows = cu_seqlens[-1] + padding
    arrays = [
        random.standard_normal((rows, h, head_dim)).astype(dtype) for h in (num_heads, num_kv_heads, num_kv_heads)
    ]
    for array in arrays:
        array[cu_seqlens[-1] :] = np.nan
    count = -(-rows // size) + len(lengths) - 1
    mask = random.random((num_heads, count + 1, count + 2)) < density
    given = None
    if columns:
        given = np.full((num_heads, len(lengths), columns), np.iinfo(np.int32).max, np.int32)
        for head in range(num_heads):
            for request, length in enumerate(lengths):
                own = np.sort(random.choice(length, min(length, columns - 1), replace=False))
                given[head, request, : len(own)] = own
    return *map(jnp.asarray, (*arrays, cu_seqlens, mask)), None if given is None else jnp.asarray(given)


def relative_error(found, arguments, size, scale, rows=None):
    """Of some rows, against a loop over rows in float64; rows past the requests have to be 0."""
    queries, keys, values = (np.asarray(array).astype(np.float64) for array in arguments[:3])
    cu_seqlens, mask, columns = (None if array is None else np.asarray(array) for array in arguments[3:])
    found = np.asarray(found).astype(np.float64)
    assert not found[cu_seqlens[-1] :].any()
    group = queries.shape[1] // keys.shape[1]
    cu_blocks = np.cumsum([0, *(-(-np.diff(cu_seqlens) // size))])
    difference = norm = 0.0
    for place in range(cu_seqlens[-1]) if rows is None else rows:
        request = np.searchsorted(cu_seqlens, place, side="right") - 1
        start, first = cu_seqlens[request], cu_blocks[request]
        key = np.arange(place - start + 1)
        own = (place - start) // size
        for head in range(queries.shape[1]):
            seen = (key // size == own) | mask[head, first + own, first + key // size]
            if columns is not None:
                seen |= np.isin(key, columns[head, request])
            at = start + key[seen]
            scores = scale * keys[at, head // group] @ queries[place, head]
            weights = np.exp(scores - scores.max())
            wanted = weights / weights.sum() @ values[at, head // group]
            difference += ((found[place, head] - wanted) ** 2).sum()
            norm += (wanted**2).sum()
    return np.sqrt(difference / norm)


@pytest.mark.parametrize("columns", [0, 5])
def test_rows_see_their_blocks_and_columns(columns: int) -> None:
    arguments = batch((300, 1, 64, 129), 10, (4, 2), 16, 64, columns, np.float32)
    found = block_sparse_attention(*arguments, block_size=64, scale=0.3, backend="reference")
    assert relative_error(found, arguments, 64, 0.3) < 1e-5


INTERPRETED = [
    # Two teams to a program with an odd number of tiles; columns in several steps, none for the first blocks.
    ([37, 1, 300, 64], 21, (3, 1), 64, 64, 70, dict(), 0.125),
    # One request that fills its last block in part, a negative scale, more steps than stages.
    ([420], 84, (2, 1), 128, 128, 0, dict(density=0.8), -0.1),
    # More blocks than one word of bits has, few of them kept.
    pytest.param([2200], 8, (1, 1), 64, 64, 20, dict(density=0.1), 0.1, marks=pytest.mark.slow),
    # Two steps to a block; a request of no rows.
    pytest.param([200, 0, 150], 150, (2, 2), 256, 128, 30, dict(), 0.0625, marks=pytest.mark.slow),
    pytest.param([200], 1, (2, 2), 256, 64, 0, dict(), 0.0625, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("lengths", "padding", "heads", "head_dim", "size", "columns", "masks", "scale"), INTERPRETED)
def test_kernels_interpreted(backend, lengths, padding, heads, head_dim, size, columns, masks, scale, capfd):
    arguments = batch(lengths, padding, heads, head_dim, size, columns, jnp.bfloat16, **masks)
    run = partial(block_sparse_attention, backend=backend)
    if backend == "mosaic_gpu":
        run = partial(block_sparse_attention_mosaic_gpu, interpretable=True)
    with interpreted(backend, capfd):
        run = partial(run, block_size=size, scale=scale)
        found = jax.block_until_ready(jax.jit(run)(*arguments))
    assert relative_error(found, arguments, size, scale) < 4e-3


def test_what_does_not_fit_is_refused() -> None:
    rows, cu_seqlens = jnp.zeros((100, 4, 16)), jnp.asarray([0, 60, 100])
    with pytest.raises(ValueError, match="block_mask is"):
        block_sparse_attention(rows, rows, rows, cu_seqlens, jnp.zeros((4, 2, 2), bool), block_size=64, scale=1.0)
    with pytest.raises(ValueError, match="values bfloat16"):
        mask = jnp.zeros((4, 3, 3), bool)
        block_sparse_attention(rows, rows, rows.astype(jnp.bfloat16), cu_seqlens, mask, block_size=64, scale=1.0)


@pytest.mark.parametrize(
    ("backend", "head_dim", "size", "dtype", "names"),
    [
        ("mosaic_gpu", 64, 64, "float32", "dtype is float32"),
        ("mosaic_gpu", 96, 64, "bfloat16", "head size is 96"),
        ("mosaic_gpu", 64, 32, "bfloat16", "block_size is 32"),
        ("mosaic_tpu", 64, 64, "float16", "dtype is float16"),
        ("mosaic_tpu", 80, 64, "bfloat16", "head size is 80"),
        ("mosaic_tpu", 64, 256, "bfloat16", "block_size is 256"),
        ("triton", 64, 64, "bfloat16", "backend is 'triton'"),
    ],
)
def test_what_a_backend_cannot_take_is_refused(backend, head_dim, size, dtype, names) -> None:
    rows, mask = jnp.zeros((100, 4, head_dim), dtype), jnp.zeros((4, 4, 4), bool)
    with pytest.raises(ValueError, match=names):
        block_sparse_attention(
            rows, rows, rows, jnp.asarray([0, 100]), mask, block_size=size, scale=1.0, backend=backend
        )


def test_automatic_choice() -> None:
    assert choose_backend(platform="cpu") == "reference"
    assert choose_backend(platform="tpu") == "mosaic_tpu"
    assert choose_backend(platform="tpu", head_dim=80) == "reference"


@pytest.mark.gpu
@pytest.mark.skipif(kernels_of() != "mosaic_gpu", reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("heads", [*FAMILIES, SMOLLM2_135M])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "padding", "columns", "density"),
    [([1500, 1, 77, 2000], 518, 200, 0.3), ([5000], 0, 0, 0.1), ([5000], 3, 500, 0.02), ([5], 0, 0, 1.0)],
)
def test_on_gpu(heads, size, lengths, padding, columns, density) -> None:
    assert choose_backend(**heads._asdict(), block_size=size) == "mosaic_gpu"
    arguments = batch(lengths, padding, heads[:2], heads.head_dim, size, columns, jnp.bfloat16, density=density)
    scale = heads.head_dim**-0.5
    run = jax.jit(partial(block_sparse_attention, block_size=size, scale=scale, backend="mosaic_gpu"))
    found, again = run(*arguments), run(*arguments)
    rows = np.unique(np.append(np.random.default_rng(0).integers(0, sum(lengths), 15), sum(lengths) - 1))
    assert relative_error(found, arguments, size, scale, rows) < 4e-3
    np.testing.assert_array_equal(*(np.asarray(one, np.float32) for one in (found, again)))
