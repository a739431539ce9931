"""gated_delta_rule: every backend against the recurrence in float64, the kernels interpreted."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule import (
    choose_backend,
    gated_delta_rule,
    gated_delta_rule_equal_lengths,
    gated_delta_step,
)
from pallas_kernels.gated_delta_rule.gpu import Tiling, gated_delta_rule_mosaic_gpu
from tests.kernels.interpreters import interpreted
from tests.kernels.oracle import gated_delta_rule as oracle

PLAIN = ("reference", "xla")


def batch_of(
    lengths, *, key_heads=1, heads=2, dims=(8, 12), padding=0, decay=0.1, dtype: Any = np.float32, seed=0
) -> tuple[Any, ...]:
    """Arguments of the rule; NaN in every row that belongs to no request."""
    random = np.random.default_rng(seed)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    rows = cu_seqlens[-1] + padding
    queries, keys = (random.normal(size=(rows, key_heads, dims[0])).astype(dtype) for _ in range(2))
    values = (3 * random.normal(size=(rows, heads, dims[1]))).astype(dtype)
    log_decay = -random.exponential(decay, (rows, heads)).astype(np.float32)
    strength = random.uniform(0, 1, (rows, heads)).astype(np.float32)
    arrays = queries, keys, values, log_decay, strength
    for array in arrays:
        array[cu_seqlens[-1] :] = np.nan
    return *arrays, cu_seqlens


def states_of(arguments, seed=1) -> Any:
    queries, _, values, *_, cu_seqlens = arguments
    shape = (len(cu_seqlens) - 1, values.shape[1], queries.shape[2], values.shape[2])
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def relative_error(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


def compare(found, arguments, initial_state, tolerance, normalise=True):
    outputs, states = found
    expected, expected_states = oracle(*arguments, initial_state, normalise)
    last = arguments[-1][-1]
    assert states.dtype == jnp.float32
    assert relative_error(outputs[:last], expected[:last]) < tolerance
    assert relative_error(states, expected_states) < tolerance
    np.testing.assert_array_equal(np.asarray(outputs[last:], np.float32), 0)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize(("normalise", "initial"), [(True, True), (False, False)])
def test_ragged_batch(backend, normalise, initial):
    arguments = batch_of([1, 63, 0, 64, 65, 127, 200], padding=70)
    if not normalise:
        arguments = (*arguments[:1], arguments[1] / 8, *arguments[2:])
    state = states_of(arguments) if initial else None
    found = jax.jit(partial(gated_delta_rule, backend=backend, normalise=normalise))(*arguments, initial_state=state)
    compare(found, arguments, state, 2e-6, normalise)


@pytest.mark.parametrize("backend", PLAIN)
def test_keys_much_alike_and_slow_decay(backend):
    arguments = list(batch_of([300], decay=1e-3))
    arguments[1] = arguments[1][:1] + 0.05 * arguments[1]
    arguments[4] = 0.9 + 0.1 * arguments[4]
    found = jax.jit(partial(gated_delta_rule, backend=backend))(*arguments)
    compare(found, arguments, None, 1e-4)


@pytest.mark.parametrize("backend", PLAIN)
def test_batch_equals_alone_and_parts_equal_the_whole(backend):
    rule = jax.jit(partial(gated_delta_rule, backend=backend))
    *arrays, cu_seqlens = batch_of([90, 90])
    state = states_of((*arrays, cu_seqlens))
    outputs, states = rule(*arrays, cu_seqlens, initial_state=state)
    for request, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        alone = [array[start:stop] for array in arrays]
        own, state_alone = rule(*alone, np.array([0, stop - start]), initial_state=state[request : request + 1])
        np.testing.assert_allclose(own, outputs[start:stop], atol=1e-6)
        np.testing.assert_allclose(state_alone[0], states[request], atol=1e-5)
        carried = state[request : request + 1]
        for part in ([array[:45] for array in alone], [array[45:] for array in alone]):
            own, carried = rule(*part, np.array([0, len(part[0])]), initial_state=carried)
        np.testing.assert_allclose(own, outputs[start + 45 : stop], atol=1e-5)
        np.testing.assert_allclose(carried[0], states[request], atol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_step_equals_rule(normalise):
    *arrays, cu_seqlens = batch_of([1, 1, 1], key_heads=2, heads=4)
    state = states_of((*arrays, cu_seqlens))
    outputs, states = jax.jit(partial(gated_delta_rule, normalise=normalise, backend="reference"))(
        *arrays, cu_seqlens, initial_state=state
    )
    step = jax.jit(partial(gated_delta_step, normalise=normalise))(*arrays, state)
    np.testing.assert_allclose(step[0], outputs, atol=1e-6)
    np.testing.assert_allclose(step[1], states, atol=1e-6)
    compare(step, (*arrays, cu_seqlens), state, 1e-6, normalise)


@pytest.mark.parametrize(("lengths", "tiling"), [([30], Tiling(1, 2)), ([65, 0, 30], Tiling(2, 2))])
def test_gpu_kernels_interpreted(lengths, tiling, capfd):
    arguments = batch_of(lengths, dims=(128, 128), padding=20, dtype=jnp.bfloat16)
    state = states_of(arguments)
    with interpreted("mosaic_gpu", capfd):
        found = jax.jit(
            partial(gated_delta_rule_mosaic_gpu, initial_state=state, normalise=True, tiling=tiling, interpret=True)
        )(*arguments)
    assert found[0].dtype == jnp.bfloat16
    compare(found, arguments, state, 2e-3)


def test_tpu_kernel_interpreted(capfd):
    arguments = batch_of([65, 0, 30], dims=(128, 128), padding=50)
    state = states_of(arguments)
    with interpreted("mosaic_tpu", capfd):
        found = jax.jit(partial(gated_delta_rule, backend="mosaic_tpu"))(*arguments, initial_state=state)
    compare(found, arguments, state, 1e-5)


def test_errors_say_what_is_wrong():
    rule: Any = gated_delta_rule
    *arrays, cu_seqlens = batch_of([8])
    queries, keys, values, log_decay, strength = arrays
    with pytest.raises(ValueError, match="needs queries and keys"):
        rule(queries[:7], *arrays[1:], cu_seqlens)
    with pytest.raises(ValueError, match="values have 7 rows and keys 8"):
        rule(queries, keys, values[:7], log_decay, strength, cu_seqlens)
    with pytest.raises(ValueError, match="2 value heads are not a multiple of 3 key heads"):
        rule(*(np.repeat(x, 3, axis=1) for x in (queries, keys)), *arrays[2:], cu_seqlens)
    with pytest.raises(ValueError, match=r"strength has shape \(8, 1\); it needs \(8, 2\)"):
        rule(*arrays[:4], strength[:, :1], cu_seqlens)
    with pytest.raises(ValueError, match=r"initial_state has shape .* it needs \(1, 2, 8, 12\)"):
        rule(*arrays, cu_seqlens, initial_state=np.zeros((1, 2, 12, 8)))
    with pytest.raises(ValueError, match="backend is 'triton'"):
        rule(*arrays, cu_seqlens, backend="triton")
    with pytest.raises(ValueError, match="'mosaic_gpu' cannot run this: queries and keys are float32"):
        rule(*arrays, cu_seqlens, backend="mosaic_gpu")
    with pytest.raises(ValueError, match="'mosaic_tpu' cannot run this: head sizes are 8"):
        rule(*arrays, cu_seqlens, backend="mosaic_tpu")


def test_automatic_choice():
    assert choose_backend(platform="cpu") == "xla"
    assert choose_backend(platform="tpu") == "mosaic_tpu"
    assert choose_backend(platform="tpu", key_dim=64) == "xla"


@pytest.mark.parametrize("length", [63, 150])
def test_equal_lengths_and_their_gradients(length):
    """Outputs against the recurrence in float64; gradients of all arguments against those of the plain recurrence."""
    *arrays, cu_seqlens = batch_of([length] * 3, key_heads=2, heads=4)
    expected, _ = oracle(*arrays, cu_seqlens, None, True)
    weights = np.random.default_rng(2).normal(size=expected.shape).astype(np.float32)

    def equal_lengths(*arrays):
        cut = (array.reshape(3, length, *array.shape[1:]) for array in arrays)
        outputs = gated_delta_rule_equal_lengths(*cut).reshape(expected.shape)
        return (outputs * weights).sum(), outputs

    def plain(*arrays):
        return (gated_delta_rule(*arrays, cu_seqlens, backend="reference")[0] * weights).sum()

    every = tuple(range(len(arrays)))
    gradients, outputs = jax.jit(jax.grad(equal_lengths, every, has_aux=True))(*arrays)
    assert relative_error(outputs, expected) < 2e-6
    for found, wanted in zip(gradients, jax.jit(jax.grad(plain, every))(*arrays), strict=True):
        assert relative_error(found, np.asarray(wanted, np.float64)) < 2e-5
