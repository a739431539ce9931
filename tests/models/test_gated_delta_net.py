"""The chunked gated delta rule against the recurrence run token by token, and what requests leave behind."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule import gated_delta_rule as rule
from pallas_kernels.gated_delta_rule import gated_delta_step as step
from uniprefill_jax.models.gated_delta_net import causal_conv

gated_delta_rule, gated_delta_step = (partial(operation, normalise=False) for operation in (rule, step))

HEADS, KEY_DIM, VALUE_DIM = 2, 16, 24


def inputs(num_rows: int, seed: int = 0):
    random = np.random.default_rng(seed)
    queries, keys = (random.standard_normal((num_rows, HEADS, KEY_DIM), dtype=np.float32) for _ in range(2))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    values = random.standard_normal((num_rows, HEADS, VALUE_DIM), dtype=np.float32)
    log_decay = -random.exponential(0.3, (num_rows, HEADS)).astype(np.float32)
    strength = random.uniform(0, 1, (num_rows, HEADS)).astype(np.float32)
    return queries, keys, values, log_decay, strength


def token_by_token(queries, keys, values, log_decay, strength):
    """Outputs and final state of one request in float64."""
    state = np.zeros((HEADS, KEY_DIM, VALUE_DIM))
    outputs = np.zeros((len(queries), HEADS, VALUE_DIM))
    for row in range(len(queries)):
        state = state * np.exp(np.float64(log_decay[row]))[:, None, None]
        error = (values[row] - np.einsum("hkv,hk->hv", state, keys[row])) * strength[row][:, None]
        state = state + keys[row][:, :, None] * error[:, None, :]
        outputs[row] = np.einsum("hkv,hk->hv", state, queries[row])
    return outputs, state


@pytest.mark.parametrize("lengths", [[1], [63], [64], [65], [1, 63, 0, 64, 129, 700], [128, 0]])
def test_matches_the_recurrence(lengths):
    cu_seqlens = np.cumsum([0, *lengths])
    num_rows = 64 * (cu_seqlens[-1] // 64 + 2)
    arrays = inputs(num_rows)
    for array in arrays:
        array[cu_seqlens[-1] :] = np.nan  # padding must not reach a result
    outputs, states = jax.jit(gated_delta_rule)(*map(jnp.asarray, arrays), jnp.asarray(cu_seqlens, jnp.int32))
    for request, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        expected, state = token_by_token(*(array[start:stop] for array in arrays))
        np.testing.assert_allclose(outputs[start:stop], expected, atol=2e-5)
        np.testing.assert_allclose(states[request], state, atol=2e-5)


def test_correlated_keys_stay_accurate():
    arrays = list(inputs(256))
    arrays[1] = np.broadcast_to(arrays[1][:1], arrays[1].shape).copy()
    arrays[3] = np.full_like(arrays[3], -1e-3)
    outputs, _ = gated_delta_rule(*map(jnp.asarray, arrays), jnp.asarray([0, 256], jnp.int32))
    expected, _ = token_by_token(*arrays)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)


def test_step_continues_the_chunked_form():
    arrays = inputs(200)
    _, states = gated_delta_rule(*map(jnp.asarray, arrays), jnp.asarray([0, 199], jnp.int32))
    output, state = gated_delta_step(*(jnp.asarray(array[199:]) for array in arrays), states)
    expected, expected_state = token_by_token(*arrays)
    np.testing.assert_allclose(output[0], expected[-1], atol=2e-5)
    np.testing.assert_allclose(state[0], expected_state, atol=2e-5)


def test_convolution_stops_at_request_starts():
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((10, 3)), random.standard_normal((4, 3))
    starts = np.array([0] * 6 + [6] * 4)
    output = causal_conv(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(starts, jnp.int32))
    for row in range(10):
        taps = [x[row - back] * weight[3 - back] for back in range(4) if row - back >= starts[row]]
        np.testing.assert_allclose(output[row], np.sum(taps, axis=0), atol=1e-5)
