"""block_score: the reference against float64, and the kernels, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels.block_score import block_score, choose_backend
from tests.kernels import oracle
from tests.kernels.interpreters import KERNELS, interpreted, ragged_batch

RAGGED = st.lists(st.one_of(st.integers(0, 40), st.integers(41, 400)), min_size=1, max_size=3).filter(any)


def scores_of(queries, keys, cu_seqlens, *, num_blocks, block_size, scale, backend="reference", **options):
    run = jax.jit(
        lambda q, k, cu, lse: block_score(
            q,
            k,
            cu,
            num_blocks=num_blocks,
            block_size=block_size,
            scale=scale,
            peak=True,
            row_log_sum_exp=lse,
            backend=backend,
            **options,
        )
    )
    return run(queries, keys, cu_seqlens, options.pop("row_log_sum_exp", None))


def check(backend, random, lengths, heads, kv_heads, head_dim, block_size, window, padding, dtype, scale):
    """Mass sums to 1 and agrees with float64, as does the peak; NaN around the requests reaches nothing."""
    queries, keys, cu = ragged_batch(
        random,
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        padding=padding,
        dtype=dtype,
    )
    num_blocks = -(-max(lengths) // block_size) + 1
    found = scores_of(queries, keys, cu, num_blocks=num_blocks, block_size=block_size, scale=scale, backend=backend)
    mass, peak, _ = oracle.block_score(
        queries.astype(np.float32), keys.astype(np.float32), cu, num_blocks, block_size, scale
    )
    np.testing.assert_allclose(found.mass, mass, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found.peak, peak, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.mass.sum(1), np.array(lengths) > 0, rtol=1e-5)


@settings(max_examples=12)
@given(
    lengths=RAGGED,
    shape=st.sampled_from([(4, 2, 64), (3, 3, 64), (4, 1, 128), (2, 1, 256)]),
    block_size=st.sampled_from([32, 64, 128]),
    window=st.sampled_from([16, 33, 128]),
    scale=st.sampled_from([0.125, 0.0, -0.2]),
    seed=st.integers(0, 9),
)
def test_reference_agrees_with_float64(lengths, shape, block_size, window, scale, seed):
    check("reference", np.random.default_rng(seed), lengths, *shape, block_size, window, 37, np.float32, scale)


def test_reference_walks_many_chunks():
    random = np.random.default_rng(0)
    check("reference", random, [5000, 0, 1, 3333], 16, 4, 64, 64, 128, 100, np.float32, 0.125)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("lengths", "shape", "block_size", "window", "padding"),
    [
        ([300, 50, 0, 131], (2, 1, 64), 64, 64, 10),  # several requests, one of them empty, one shorter than the window
        ([520], (2, 2, 128), 32, 128, 0),  # one request, whole window, no group
        ([200], (2, 1, 256), 128, 33, 3),  # window and rows that are multiples of nothing
    ],
)
def test_kernels_interpreted(backend, lengths, shape, block_size, window, padding, capfd):
    with interpreted(backend, capfd):
        check(
            backend,
            np.random.default_rng(1),
            lengths,
            *shape,
            block_size,
            window,
            padding,
            jnp.bfloat16,
            shape[2] ** -0.5,
        )


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=RAGGED,
    shape=st.sampled_from([(4, 2, 64), (3, 3, 64), (4, 1, 128), (2, 1, 256)]),
    block_size=st.sampled_from([32, 64, 128]),
    window=st.sampled_from([16, 33, 128]),
    padding=st.integers(0, 20),
    scale=st.sampled_from([0.125, -0.2]),
)
def test_kernels_interpreted_on_any_shape(backend, lengths, shape, block_size, window, padding, scale, capfd):
    random = np.random.default_rng(len(lengths))
    with interpreted(backend, capfd):
        check(backend, random, lengths, *shape, block_size, window, padding, jnp.bfloat16, scale)


@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_given_log_sum_exp_and_undivided_sums(backend, capfd):
    lengths, shape = [150, 40], dict(heads=4, kv_heads=2, head_dim=64)
    queries, keys, cu = ragged_batch(
        np.random.default_rng(2), lengths, **shape, window=64, padding=8, dtype=jnp.bfloat16
    )
    mass, peak, rows = oracle.block_score(
        queries.astype(np.float32), keys.astype(np.float32), cu, 3, 64, 0.125, normalise=False
    )
    with interpreted(backend, capfd):
        found = scores_of(
            queries,
            keys,
            cu,
            num_blocks=3,
            block_size=64,
            scale=0.125,
            backend=backend,
            normalise=False,
            row_log_sum_exp=rows.astype(np.float32),
        )
    np.testing.assert_allclose(found.mass, mass, rtol=2e-5)
    np.testing.assert_allclose(found.peak, peak, rtol=2e-5)


def test_bfloat16_reference_within_the_stated_error():
    random = np.random.default_rng(3)
    check("reference", random, [700], 4, 2, 128, 64, 128, 4, jnp.bfloat16, 128**-0.5)


def test_lengths_do_not_recompile():
    traces = []

    @jax.jit
    def run(queries, keys, cu):
        traces.append(1)
        return block_score(queries, keys, cu, num_blocks=4, block_size=64, scale=0.1).mass

    queries, keys = jnp.ones((1, 16, 2, 64)), jnp.ones((256, 1, 64))
    for length in (256, 100, 3):
        run(queries, keys, jnp.array([0, length]))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("backend", "shape", "dtype", "block_size", "names"),
    [
        ("mosaic_gpu", (4, 2, 64), "float32", 64, "dtype is float32"),
        ("mosaic_gpu", (4, 2, 96), "bfloat16", 64, "head size is 96"),
        ("mosaic_gpu", (4, 2, 64), "bfloat16", 48, "block_size is 48"),
        ("mosaic_tpu", (4, 2, 64), "float16", 64, "dtype is float16"),
        ("mosaic_tpu", (4, 2, 96), "bfloat16", 64, "head size is 96"),
        ("mosaic_tpu", (4, 2, 64), "bfloat16", 16, "block_size is 16"),
        ("mosaic_tpu", (64, 1, 64), "bfloat16", 128, "64 query heads per key head"),
        ("triton", (4, 2, 64), "bfloat16", 64, "backend is 'triton'"),
        ("reference", (3, 2, 64), "bfloat16", 64, "3 query heads are not a multiple of 2"),
    ],
)
def test_what_a_backend_cannot_take_is_refused_before_lowering(backend, shape, dtype, block_size, names):
    heads, kv_heads, head_dim = shape
    queries = jax.ShapeDtypeStruct((1, 128, heads, head_dim), dtype)
    keys = jax.ShapeDtypeStruct((256, kv_heads, head_dim), dtype)
    with pytest.raises(ValueError, match=names):
        jax.eval_shape(
            lambda q, k: block_score(
                q, k, jnp.array([0, 256]), num_blocks=4, block_size=block_size, scale=1.0, backend=backend
            ),
            queries,
            keys,
        )


def test_automatic_choice():
    assert choose_backend(platform="cpu") == "reference"
    assert choose_backend(platform="tpu") == "mosaic_tpu"
    assert choose_backend(platform="tpu", head_dim=80) == "reference"
