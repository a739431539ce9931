"""causal_attention: the reference against float64, and the kernels against float64, interpreted and on a Hopper GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_score.shapes import FAMILIES, SMOLLM2_135M
from pallas_kernels.causal_attention import causal_attention, choose_backend
from pallas_kernels.causal_attention.gpu import Tiling, causal_attention_mosaic_gpu
from pallas_kernels.platform import kernels_of
from tests.kernels.interpreters import KERNELS, interpreted

needs_hopper = pytest.mark.skipif(kernels_of() != "mosaic_gpu", reason="needs a GPU of compute capability 9.0")


def float64_attention(queries, keys, values, row_start, rows, scale):
    """Outputs and log-sum-exps of some rows, one after another."""
    queries = np.asarray(queries, np.float64)
    keys, values = (np.asarray(array, np.float64).swapaxes(0, 1) for array in (keys, values))
    outputs, lse = [], []
    for row in rows:
        seen = slice(row_start[row], row + 1)
        grouped = queries[row].reshape(len(keys), -1, queries.shape[2])
        scores = scale * grouped @ keys[:, seen].swapaxes(1, 2)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        outputs.append((weights / total @ values[:, seen]).reshape(queries.shape[1:]))
        lse.append((top + np.log(total)).reshape(-1))
    return np.array(outputs), np.array(lse)


def visible_from(random, lengths, window, kept):
    """First visible row of the packed rows of some requests; the window counts positions, of which a share was kept."""
    starts = []
    for length in lengths:
        positions = np.sort(random.permutation(int(length / kept))[:length])
        reach = 0 if window is None else positions - window + 1
        starts.append(sum(map(len, starts)) + np.searchsorted(positions, np.broadcast_to(reach, length)))
    return np.concatenate(starts)


def packed(random, lengths, padding, heads, kv_heads, head_dim, dtype, *, window=None, kept=1.0):
    """Arguments of `causal_attention`; padding rows hold NaN and starts that mean nothing."""
    count = sum(lengths)
    row_start = np.concatenate([visible_from(random, lengths, window, kept), random.integers(-9, 9999, padding)])
    arrays = [random.normal(size=(count + padding, h, head_dim)) for h in (heads, kv_heads, kv_heads)]
    for array in arrays:
        array[count:] = np.nan
    return (*(array.astype(dtype) for array in arrays), row_start.astype(np.int32), np.int32(count))


def agrees_with_float64(found, arguments, scale, error, rows=None):
    """Relative error of outputs below `error`; log-sum-exps to float32; zeros in padding."""
    queries, keys, values, row_start, count = arguments
    outputs, lse = (np.asarray(array, np.float64) for array in found)
    rows = np.arange(count) if rows is None else rows
    plain = [np.asarray(array, np.float32) for array in (queries, keys, values)]
    exact, exact_lse = float64_attention(*plain, row_start, rows, scale)
    assert np.linalg.norm(outputs[rows] - exact) <= error * np.linalg.norm(exact)
    np.testing.assert_allclose(lse[rows], exact_lse, rtol=1e-5, atol=1e-5)
    assert not outputs[count:].any() and not lse[count:].any()


@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    padding=st.integers(0, 9),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    window=st.sampled_from([None, 1, 7, 40]),
    kept=st.sampled_from([1.0, 0.4]),
    scale=st.sampled_from([0.125, 0.0, -0.3]),
)
def test_reference_agrees_with_float64(lengths, padding, heads, window, kept, scale):
    random = np.random.default_rng(sum(lengths))
    arguments = packed(random, lengths, padding, *heads, 16, np.float32, window=window, kept=kept)
    found = jax.jit(lambda *a: causal_attention(*a, scale=scale, return_lse=True, backend="reference"))(*arguments)
    agrees_with_float64(found, arguments, scale, 1e-6)


INTERPRETED = [
    # Several requests, one shorter than a row tile, another that spans several; rows that are a multiple of nothing.
    ([37, 1, 180, 20], 21, (2, 1, 64), Tiling(2, 64, 2), dict(), 0.125),
    # A window of positions after a drop, whole tiles of padding, a negative scale.
    ([230], 154, (1, 1, 128), Tiling(2, 128, 2), dict(window=90, kept=0.5), -0.1),
    # A window within several requests, more steps than stages.
    pytest.param([50, 250], 20, (1, 1, 256), Tiling(2, 64, 2), dict(window=80), 0.0625, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("lengths", "padding", "shape", "tiling", "ranges", "scale"), INTERPRETED)
def test_kernels_interpreted(backend, lengths, padding, shape, tiling, ranges, scale, capfd):
    arguments = packed(np.random.default_rng(1), lengths, padding, *shape, jnp.bfloat16, **ranges)

    def run(*arguments):
        if backend == "mosaic_gpu":
            return causal_attention_mosaic_gpu(
                *arguments, scale=scale, return_lse=True, tiling=tiling, interpretable=True
            )
        return causal_attention(*arguments, scale=scale, return_lse=True, backend=backend)

    with interpreted(backend, capfd):
        found = jax.block_until_ready(jax.jit(run)(*arguments))
    agrees_with_float64(found, arguments, scale, 4e-3)


def test_ranges_do_not_recompile():
    traces = []

    @jax.jit
    def run(queries, keys, row_start, count):
        traces.append(1)
        return causal_attention(queries, keys, keys, row_start, count, scale=0.1)

    queries, keys = jnp.ones((64, 2, 64)), jnp.ones((64, 1, 64))
    for count in (64, 10, 0):
        run(queries, keys, jnp.minimum(jnp.arange(64), count), count)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("backend", "shape", "dtype", "names"),
    [
        ("mosaic_gpu", (4, 2, 64), "float32", "dtype is float32"),
        ("mosaic_gpu", (4, 2, 96), "bfloat16", "head size is 96"),
        ("mosaic_tpu", (4, 2, 64), "float16", "dtype is float16"),
        ("mosaic_tpu", (4, 2, 80), "bfloat16", "head size is 80"),
        ("mosaic_tpu", (32, 1, 64), "bfloat16", "32 query heads per key head"),
        ("triton", (4, 2, 64), "bfloat16", "backend is 'triton'"),
        ("reference", (3, 2, 64), "bfloat16", "3 query heads are not a multiple of 2"),
    ],
)
def test_what_a_backend_cannot_take_is_refused_before_lowering(backend, shape, dtype, names):
    heads, kv_heads, head_dim = shape
    queries = jax.ShapeDtypeStruct((128, heads, head_dim), dtype)
    keys = jax.ShapeDtypeStruct((128, kv_heads, head_dim), dtype)
    starts = jnp.zeros(128, jnp.int32)
    with pytest.raises(ValueError, match=names):
        jax.eval_shape(lambda q, k: causal_attention(q, k, k, starts, 128, scale=1.0, backend=backend), queries, keys)


def test_shapes_that_do_not_fit_are_named():
    queries, keys, starts = jnp.ones((8, 2, 64)), jnp.ones((8, 1, 64)), jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match="row_start has shape"):
        causal_attention(queries, keys, keys, starts[:4], 8, scale=1.0)
    with pytest.raises(ValueError, match="both must be"):
        causal_attention(queries, keys, keys[:4], starts, 8, scale=1.0)
    with pytest.raises(ValueError, match="values float16"):
        causal_attention(queries, keys, keys.astype(jnp.float16), starts, 8, scale=1.0)


def test_automatic_choice():
    assert choose_backend(platform="cpu") == "reference"
    assert choose_backend(platform="tpu") == "mosaic_tpu"
    assert choose_backend(platform="tpu", head_dim=80) == "reference"


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("heads", "dtype"), [*((heads, "bfloat16") for heads in (*FAMILIES, SMOLLM2_135M)), (FAMILIES[0], "float16")]
)
@pytest.mark.parametrize(
    ("lengths", "padding", "ranges"),
    [
        ([1500, 1, 77, 2000], 518, dict()),
        ([900, 1700], 1, dict(window=700, kept=0.5)),
        ([5], 0, dict()),
    ],
)
def test_on_gpu(heads, dtype, lengths, padding, ranges):
    random = np.random.default_rng(len(lengths))
    arguments = packed(random, lengths, padding, *heads, dtype, **ranges)
    scale = heads.head_dim**-0.5
    run = jax.jit(lambda *a: causal_attention(*a, scale=scale, return_lse=True, backend="mosaic_gpu"))
    found, again = run(*arguments), run(*arguments)
    rows = np.unique(np.append(random.integers(0, arguments[-1], 50), arguments[-1] - 1))
    agrees_with_float64(found, arguments, scale, 4e-3, rows)
    np.testing.assert_array_equal(*(np.asarray(one[0], np.float32) for one in (found, again)))


@pytest.mark.gpu
@needs_hopper
def test_on_gpu_inside_control_flow():
    arguments = packed(np.random.default_rng(0), [700], 68, 4, 2, 128, jnp.bfloat16)

    def attend(backend):
        def branch(rows):
            def run(queries, keys, values, row_start, count):
                def again(_, queries):
                    cut = (array[:rows] for array in (queries, keys, values, row_start))
                    out = causal_attention(*cut, jnp.minimum(count, rows), scale=0.1, backend=backend)
                    return jnp.pad(out, ((0, queries.shape[0] - rows), (0, 0), (0, 0)))

                return jax.lax.fori_loop(0, 2, again, queries)

            return run

        return jax.jit(lambda index, *a: jax.lax.switch(index, [branch(rows) for rows in (768, 512, 320)], *a))

    for index in range(3):
        found, expected = (
            np.asarray(attend(name)(index, *arguments), np.float32) for name in ("mosaic_gpu", "reference")
        )
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, atol=0.03)
