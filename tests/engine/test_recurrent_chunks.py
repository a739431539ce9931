"""A Gated DeltaNet layer fed in chunks, padded and cut anywhere, leaves and gives what it does at once."""

import jax
import numpy as np
import pytest
from flax import nnx

import uniprefill_jax as up
from tests.engine.tiny import MODELS, SIZES
from tests.parity.compare import relative_error
from uniprefill_jax.models.gated_delta_net import GatedDeltaNet, RecurrentCache


@pytest.fixture(scope="module")
def layer():
    shape = SIZES | MODELS["qwen3_next"] | {"num_hidden_layers": 1, "num_experts": 0}
    llm = up.LLM.from_config(shape, dtype="float32", seed=3)
    layer = nnx.merge(llm.programs.graph, llm.programs.parameters).layer("linear_dense", 0).mixer
    assert isinstance(layer, GatedDeltaNet)
    return layer


@pytest.fixture(scope="module")
def extend(layer):
    return jax.jit(layer.extend)


@pytest.mark.parametrize("cuts", [(64, 136), (1, 2, 197), (63, 65, 72), (127, 1, 72)])
def test_chunks_equal_the_whole(extend, cuts):
    x = np.random.default_rng(0).standard_normal((200, SIZES["hidden_size"]), dtype=np.float32)
    heads, channels = 4, 2 * 2 * 16 + 4 * 16
    empty = RecurrentCache(*(np.zeros(shape, np.float32) for shape in ((1, 3, channels), (1, heads, 16, 16))))
    whole, left = extend(np.pad(x, ((0, 56), (0, 0))), empty, np.asarray([0, 200], np.int32))
    cache, start = empty, 0
    for count in cuts:
        # Padding of any finite content must not reach a state.
        rows = np.full((256, x.shape[1]), 7.0, np.float32)
        rows[:count] = x[start : start + count]
        output, cache = extend(rows, cache, np.asarray([0, count], np.int32))
        # The norm of the output amplifies rounding where the recurrence yields little.
        assert relative_error(output[:count], whole[start : start + count]) <= 5e-5
        start += count
    np.testing.assert_array_equal(cache.conv_state, left.conv_state)
    assert relative_error(cache.recurrent_state, left.recurrent_state) <= 1e-5


def test_requests_in_one_chunk_equal_each_alone(extend):
    """Requests of any number of rows, none included, go on from their own states; padding holds anything."""
    random = np.random.default_rng(1)
    heads, channels, counts = 4, 2 * 2 * 16 + 4 * 16, (5, 0, 70, 1, 0, 2)
    states = [
        RecurrentCache(*(random.standard_normal(shape, np.float32) for shape in ((1, 3, channels), (1, heads, 16, 16))))
        for _ in counts
    ]
    rows = [random.standard_normal((count, SIZES["hidden_size"]), dtype=np.float32) for count in counts]
    packed = np.full((256, SIZES["hidden_size"]), 7.0, np.float32)
    packed[: sum(counts)] = np.concatenate(rows)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    joint = RecurrentCache(*(np.concatenate(parts) for parts in zip(*states, strict=True)))
    outputs, left = extend(packed, joint, bounds)
    for number, (own, state, count) in enumerate(zip(rows, states, counts, strict=True)):
        padded = np.pad(own, ((0, 256 - count), (0, 0)))
        wanted, wanted_left = extend(padded, state, np.asarray([0, count], np.int32))
        if count:
            assert relative_error(outputs[bounds[number] : bounds[number + 1]], wanted[:count]) <= 5e-5
        np.testing.assert_array_equal(left.conv_state[number], wanted_left.conv_state[0])
        assert relative_error(left.recurrent_state[number], wanted_left.recurrent_state[0]) <= 1e-5
