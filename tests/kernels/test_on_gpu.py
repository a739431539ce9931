"""The Mosaic GPU kernels on a Hopper GPU: accuracy, kept sets, NaN in memory that no request owns, equal bits twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_score import block_score, shapes
from pallas_kernels.compact_rows import compact_rows
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.platform import kernels_of
from pallas_kernels.row_norms import add_rows, norm_rows
from pallas_kernels.row_norms import shapes as row_shapes
from pallas_kernels.top_p_select import top_p_select
from tests.kernels import oracle
from tests.kernels.interpreters import ragged_batch
from tests.kernels.test_row_norms import exact_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernels_of() != "mosaic_gpu", reason="needs a GPU of compute capability 9.0"),
]


@pytest.mark.parametrize("lengths", [[4096], [1500, 0, 77, 2000], [129]])
@pytest.mark.parametrize("heads", [*shapes.FAMILIES, shapes.SMOLLM2_135M])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_score(lengths, heads, block_size):
    random = np.random.default_rng(len(lengths))
    queries, keys, cu = ragged_batch(
        random, lengths, **heads._asdict(), window=128, padding=-sum(lengths) % 8 + 8, dtype=jnp.bfloat16
    )
    num_blocks = -(-max(lengths) // block_size)
    run = jax.jit(
        lambda q, k, cu: block_score(
            q,
            k,
            cu,
            num_blocks=num_blocks,
            block_size=block_size,
            scale=heads.head_dim**-0.5,
            peak=True,
            backend="mosaic_gpu",
        )
    )
    found, again = run(queries, keys, cu), run(queries, keys, cu)
    mass, peak, _ = oracle.block_score(
        queries.astype(np.float32), keys.astype(np.float32), cu, num_blocks, block_size, heads.head_dim**-0.5
    )
    np.testing.assert_allclose(found.mass, mass, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(found.peak, peak, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(found.mass, again.mass)
    np.testing.assert_array_equal(found.peak, again.peak)


@pytest.mark.parametrize("cut", ["crossing", "below"])
@pytest.mark.parametrize("over", ["all", "candidates"])
@pytest.mark.parametrize("lengths", [[131072], [900, 0, 5000, 333]])
def test_top_p_select(cut, over, lengths):
    random = np.random.default_rng(7)
    num_blocks = -(-max(lengths) // 64)
    scores = random.random((len(lengths), num_blocks)).astype(np.float32) ** 6
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    found, expected = (
        jax.jit(
            lambda s, cu, backend=backend: top_p_select(
                s,
                cu,
                0.8,
                num_rows=sum(lengths),
                block_size=64,
                sink_tokens=128,
                window_tokens=128,
                cut=cut,
                over=over,
                backend=backend,
            )
        )(scores, cu)
        for backend in ("mosaic_gpu", "reference")
    )
    assert np.asarray(expected.cut_margin).min() > 1e-6
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.cu_seqlens, expected.cu_seqlens)
    np.testing.assert_array_equal(found.kept_blocks, expected.kept_blocks)


@pytest.mark.parametrize(("shape", "dtype"), [((4096,), jnp.bfloat16), ((3840,), jnp.bfloat16), ((8, 128), np.float32)])
@pytest.mark.parametrize(("count", "out_rows"), [(3000, 4096), (4096, 4096), (0, 4096), (4000, 2000)])
def test_compact_rows(shape, dtype, count, out_rows):
    random = np.random.default_rng(count)
    kept = np.sort(random.permutation(4096)[:count])
    array = random.normal(size=(4096, *shape)).astype(dtype)
    array[np.setdiff1d(np.arange(4096), kept)] = np.nan
    indices = np.pad(kept, (0, 4096 - count), constant_values=4096).astype(np.int32)
    found, expected = (
        jax.jit(lambda a, i, c, backend=backend: compact_rows((a,), i, c, out_rows=out_rows, backend=backend))(
            array, indices, count
        )[0]
        for backend in ("mosaic_gpu", "reference")
    )
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("lengths", [[1000], [1, 63, 64, 65, 0, 127, 200]])
@pytest.mark.parametrize("heads", [2, 64])
@pytest.mark.parametrize("decay", [0.1, 1e-3])
def test_gated_delta_rule(lengths, heads, decay):
    random = np.random.default_rng(heads)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    rows = cu[-1] + 100
    queries, keys = (random.normal(size=(rows, heads // 2, 128)).astype(jnp.bfloat16) for _ in range(2))
    values = (100 * random.normal(size=(rows, heads, 128))).astype(jnp.bfloat16)
    log_decay = -random.exponential(decay, (rows, heads)).astype(np.float32)
    strength = random.uniform(0, 1, (rows, heads)).astype(np.float32)
    arrays = queries, keys, values, log_decay, strength
    for array in arrays:
        array[cu[-1] :] = np.nan
    state = random.normal(size=(len(lengths), heads, 128, 128)).astype(np.float32)
    run = jax.jit(lambda *a: gated_delta_rule(*a[:-1], initial_state=a[-1], backend="mosaic_gpu"))
    outputs, states = run(*arrays, cu, state)
    expected, expected_states = oracle.gated_delta_rule(*arrays, cu, state)

    def error(found, expected):
        return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)

    assert error(outputs[: cu[-1]], expected[: cu[-1]]) < 2e-3  # rounding the outputs to bfloat16 alone is 1.7e-3
    assert error(states, expected_states) < 1e-3
    np.testing.assert_array_equal(np.asarray(outputs[cu[-1] :], np.float32), 0)
    again = run(*arrays, cu, state)
    np.testing.assert_array_equal(np.asarray(outputs, np.float32), np.asarray(again[0], np.float32))
    np.testing.assert_array_equal(states, again[1])


@pytest.mark.parametrize("width", row_shapes.WIDTHS)
@pytest.mark.parametrize("zero_centred", [False, True])
def test_row_norms(width, zero_centred):
    random = np.random.default_rng(width)
    x, delta = (random.normal(size=(5000, width)).astype(jnp.bfloat16) for _ in range(2))
    weight = random.normal(size=width).astype(jnp.bfloat16)
    settings = {"eps": 1e-6, "zero_centred": zero_centred, "backend": "mosaic_gpu"}
    for count in (5000, 3001, 1):
        for array in (x, delta):
            array[count:] = np.nan
        results = jax.jit(
            lambda x, d, w, c: (
                norm_rows(x, w, c, **settings),
                add_rows(x, d, c, backend="mosaic_gpu"),
                add_rows(x, d, c, weight=w, **settings),
            )
        )(x, delta, weight, count)
        # Against float64: XLA leaves out roundings to bfloat16 that the reference asks for.
        one, other = x[:count].astype(np.float64), delta[:count].astype(np.float64)
        normed, normed_delta = (exact_norm(rows, weight, 1e-6, zero_centred) for rows in (one, other))
        for found, expected in zip(results, (normed, one + other, one + normed_delta), strict=True):
            error = np.linalg.norm(np.asarray(found[:count], np.float64) - expected) / np.linalg.norm(expected)
            assert error < 4e-3
