"""Block-sparse attention against a loop over rows in float64 numpy: ragged, grouped heads, with and without columns."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import block_sparse_attention

LENGTHS, SIZE, SCALE = (300, 1, 64, 129), 64, 0.3


@pytest.mark.parametrize("with_columns", [False, True])
def test_rows_see_their_blocks_and_columns(with_columns: bool) -> None:
    random = np.random.default_rng(8)
    cu_seqlens = np.cumsum([0, *LENGTHS]).astype(np.int32)
    rows = cu_seqlens[-1] + 10
    queries = random.standard_normal((rows, 4, 16)).astype(np.float32)
    keys, values = random.standard_normal((2, rows, 2, 16)).astype(np.float32)
    values[cu_seqlens[-1] :] = np.nan
    cu_blocks = np.cumsum([0, *(-(-length // SIZE) for length in LENGTHS)])
    mask = random.random((4, cu_blocks[-1] + 2, cu_blocks[-1] + 2)) < 0.3
    columns = None
    if with_columns:
        columns = np.full((4, len(LENGTHS), 5), np.iinfo(np.int32).max, np.int32)
        for head in range(4):
            for request, length in enumerate(LENGTHS):
                own = np.sort(random.choice(length, min(length, 4), replace=False))
                columns[head, request, : len(own)] = own
    arrays = (jnp.asarray(array) for array in (queries, keys, values, cu_seqlens, mask))
    given = None if columns is None else jnp.asarray(columns)
    found = np.asarray(block_sparse_attention(*arrays, given, block_size=SIZE, scale=SCALE))
    wanted = np.zeros(queries.shape)
    for request, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        for head in range(4):
            for row in range(stop - start):
                seen = [
                    key
                    for key in range(row + 1)
                    if key // SIZE == row // SIZE
                    or mask[head, cu_blocks[request] + row // SIZE, cu_blocks[request] + key // SIZE]
                    or (columns is not None and key in columns[head, request])
                ]
                own = start + np.asarray(seen)
                scores = SCALE * keys[own, head // 2].astype(np.float64) @ queries[start + row, head]
                weights = np.exp(scores - scores.max())
                wanted[start + row, head] = weights / weights.sum() @ values[own, head // 2]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    rows, cu_seqlens = jnp.zeros((100, 4, 16)), jnp.asarray([0, 60, 100])
    with pytest.raises(ValueError, match="block_mask is"):
        block_sparse_attention(rows, rows, rows, cu_seqlens, jnp.zeros((4, 2, 2), bool), block_size=64, scale=1.0)
    with pytest.raises(ValueError, match="backend is"):
        mask = jnp.zeros((4, 3, 3), bool)
        block_sparse_attention(rows, rows, rows, cu_seqlens, mask, block_size=64, scale=1.0, backend="mosaic_gpu")
