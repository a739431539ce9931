"""paged_attention on a Hopper GPU: accuracy, NaN in rows that nobody sees, equal bits twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import gpu, paged_attention, shapes
from pallas_kernels.platform import kernels_of
from tests.kernels import oracle
from tests.kernels.interpreters import paged_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernels_of() != "mosaic_gpu", reason="needs a GPU of compute capability 9.0"),
]


def check(run, arrays, scale):
    found, again = (np.asarray(run(*arrays), np.float64) for _ in range(2))
    expected = oracle.paged_attention(*arrays, scale)
    # Rounding outputs to bfloat16 alone is 1.7e-3, weights another 1e-3.
    assert np.linalg.norm(found - expected) <= 4e-3 * np.linalg.norm(expected)
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize("heads", [*shapes.FAMILIES, shapes.SMOLLM2_135M, shapes.Heads(32, 2, 128)])
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize(
    ("lengths", "window"),
    [([20000], None), ([20000], 500), ([1, 0, 63, 64, 65, 0, 0, 3000, 129, 7], None), ([0, 300] * 40, 40)],
)
def test_paged_attention(heads, page, lengths, window):
    first = [max(length - window, 0) if window else 0 for length in lengths]
    arrays = paged_batch(
        np.random.default_rng(len(lengths)), lengths, first, **heads._asdict(), page=page, dtype=jnp.bfloat16
    )
    scale = heads.head_dim**-0.5
    check(jax.jit(lambda *a: paged_attention(*a, scale=scale, backend="mosaic_gpu")), arrays, scale)


@pytest.mark.parametrize("tiling", [gpu.Tiling(64, 1, 4), gpu.Tiling(128, 3, 1), gpu.Tiling(64, 6, 1)])
def test_tilings(tiling):
    arrays = paged_batch(
        np.random.default_rng(0),
        [900, 5000, 0, 77],
        [0, 4001, 0, 3],
        heads=32,
        kv_heads=8,
        head_dim=128,
        page=32,
        dtype=jnp.bfloat16,
    )
    check(jax.jit(lambda *a: gpu.paged_attention_mosaic_gpu(*a, scale=0.1, tiling=tiling)), arrays, 0.1)


def test_nothing_to_see():
    pages = jnp.full((4, 8, 64, 128), jnp.nan, jnp.bfloat16)
    table, lengths = jnp.full((3, 2), 1 << 30, jnp.int32), jnp.zeros(3, jnp.int32)
    found = paged_attention(
        jnp.ones((3, 32, 128), jnp.bfloat16), pages, pages, table, lengths, lengths, scale=1.0, backend="mosaic_gpu"
    )
    np.testing.assert_array_equal(np.asarray(found, np.float32), 0)
