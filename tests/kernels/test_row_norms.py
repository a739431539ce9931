"""row_norms: the kernel, interpreted, against the reference, with NaN in every padding row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_norms import add_rows, choose_backend, norm_rows
from tests.kernels.interpreters import interpreted


def hidden(random, rows, count, width):
    array = random.normal(size=(rows, width)).astype(jnp.bfloat16)
    array[count:] = np.nan
    return array


def exact_norm(x, weight, eps, zero_centred):
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    return normed * (weight.astype(np.float64) + zero_centred)


def error(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("backend", "rows", "count", "width"),
    [("mosaic_gpu", 9, 5, 512), ("mosaic_gpu", 3, 0, 256), ("reference", 40, 40, 3840)],
)
@pytest.mark.parametrize("zero_centred", [False, True])
def test_equal_float64(backend, rows, count, width, zero_centred, capfd):
    random = np.random.default_rng(rows)
    x, delta = (hidden(random, rows, count, width) for _ in range(2))
    weights = random.normal(size=(3, width)).astype(jnp.bfloat16)
    weights[[0, 2]] = np.nan
    weight = weights[1]
    settings = {"eps": 1e-3, "zero_centred": zero_centred, "backend": backend}

    def normed_sum(x, delta, weights, layer, count):
        return add_rows(x, delta, count, weight=weights, layer=layer, **settings)

    with interpreted("mosaic_gpu", capfd):
        normed = jax.jit(lambda *a: norm_rows(*a, **settings))(x, weight, count)
        plain = jax.jit(lambda *a: add_rows(*a, backend=backend))(x, delta, count)
        added = jax.jit(normed_sum)(x, delta, weights, 1, count)
    if count:
        x, delta = x[:count], delta[:count]
        wide = x.astype(np.float64)
        assert error(normed[:count], exact_norm(x, weight, 1e-3, zero_centred)) < 4e-3
        assert error(plain[:count], wide + delta.astype(np.float64)) < 3e-3
        assert error(added[:count], wide + exact_norm(delta, weight, 1e-3, zero_centred)) < 4e-3
        settings["backend"] = "reference"
        reference = norm_rows(jnp.asarray(x), jnp.asarray(weight), count, **settings)
        assert error(normed[:count], np.asarray(reference, np.float64)) < 1e-3, "more than the order of a sum"


def test_refusals():
    x = jnp.ones((4, 512), jnp.bfloat16)
    for width, dtype in ((500, jnp.bfloat16), (512, jnp.float32), (16384, jnp.bfloat16)):
        with pytest.raises(ValueError, match="cannot run this"):
            norm_rows(jnp.ones((4, width), dtype), jnp.ones(width, dtype), 4, eps=1e-6, backend="mosaic_gpu")
    with pytest.raises(ValueError, match="weight has shape"):
        norm_rows(x, jnp.ones(4), 4, eps=1e-6)
    with pytest.raises(ValueError, match="they must agree"):
        add_rows(x, x[:2], 4)
    with pytest.raises(ValueError, match="backend is 'triton'"):
        add_rows(x, x, 4, backend="triton")
    assert choose_backend(platform="cpu") == choose_backend(platform="tpu") == "reference"
