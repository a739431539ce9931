"""compact_rows: the reference, and the kernels, interpreted, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.compact_rows import choose_backend, compact_rows
from tests.kernels.interpreters import KERNELS, interpreted


def expected_rows(array, indices, count, out_rows):
    out = np.zeros((out_rows, *array.shape[1:]), array.dtype)
    live = min(count, out_rows)
    out[:live] = array[indices[:live]]
    return out


def packed(random, rows, count, shape, dtype):
    """An array with NaN in the rows that leave, and padded indices of those that stay."""
    kept = np.sort(random.permutation(rows)[:count])
    array = random.normal(size=(rows, *shape)).astype(dtype)
    array[np.setdiff1d(np.arange(rows), kept)] = np.nan
    return array, np.pad(kept, (0, rows - count), constant_values=rows).astype(np.int32)


@settings(max_examples=15)
@given(rows=st.integers(1, 60), share=st.integers(0, 8), out=st.integers(1, 12), seed=st.integers(0, 99))
def test_reference(rows, share, out, seed):
    count, out_rows = rows * share // 8, max(1, rows * out // 8)
    array, indices = packed(np.random.default_rng(seed), rows, count, (3,), np.float32)
    positions = np.arange(rows, dtype=np.int32)
    found = jax.jit(lambda a, i, c: compact_rows(a, i, c, out_rows=out_rows))(
        (array, positions, positions > 3), indices, count
    )
    for one, source in zip(found, (array, positions, positions > 3), strict=True):
        np.testing.assert_array_equal(one, expected_rows(source, indices, count, out_rows))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("rows", "count", "shape", "dtype", "out_rows"),
    [(90, 41, (512,), jnp.bfloat16, 70), (70, 70, (2, 64), np.float32, 83), (64, 0, (128,), np.float32, 64)],
)
def test_kernels_interpreted(backend, rows, count, shape, dtype, out_rows, capfd):
    array, indices = packed(np.random.default_rng(rows), rows, count, shape, dtype)
    with interpreted(backend, capfd):
        (found,) = jax.jit(lambda a, i, c: compact_rows((a,), i, c, out_rows=out_rows, backend=backend))(
            array, indices, count
        )
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), expected_rows(array.astype(np.float32), indices, count, out_rows)
    )


@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_interpreted_on_whole_blocks_and_several_steps(backend, capfd):
    random = np.random.default_rng(0)
    rows, kept = 640, np.r_[0:128, 192:320, 330:580]
    array = random.normal(size=(rows, 128)).astype(np.float32)
    indices = np.pad(kept, (0, rows - kept.size), constant_values=rows).astype(np.int32)
    with interpreted(backend, capfd):
        (found,) = jax.jit(lambda a, i, c: compact_rows((a,), i, c, out_rows=600, backend=backend))(
            array, indices, kept.size
        )
    np.testing.assert_array_equal(found, expected_rows(array, indices, kept.size, 600))


def test_errors_name_the_array():
    indices = jnp.arange(8, dtype=jnp.int32)
    with pytest.raises(ValueError, match="arrays is empty"):
        compact_rows((), indices, 8, out_rows=8)
    with pytest.raises(ValueError, match=r"arrays\[1\] has 7 rows"):
        compact_rows((jnp.ones((8, 2)), jnp.ones((7, 2))), indices, 8, out_rows=8)
    with pytest.raises(ValueError, match="backend is 'triton'"):
        compact_rows((jnp.ones((8, 2)),), indices, 8, out_rows=8, backend="triton")
    for backend in KERNELS:
        with pytest.raises(ValueError, match=r"cannot move arrays\[0\], int32\(8,\)"):
            compact_rows((indices,), indices, 8, out_rows=8, backend=backend)


def test_automatic_choice():
    assert choose_backend(platform="cpu") == choose_backend(platform="tpu") == "reference"
