"""Buckets hold what they must with little waste; the cost model agrees with counting by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniprefill_jax.bench.architectures import ARCHITECTURES
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import parameter_specs
from uniprefill_jax.sparsify.buckets import ROW_MULTIPLE, length_ladder, prompt_bucket, request_bucket
from uniprefill_jax.sparsify.cost import attention_pairs, prefill_flops
from uniprefill_jax.sparsify.drop_layers import auto_drop_layers, resolve_drop_layers
from uniprefill_jax.sparsify.traffic import prefill_bytes


@given(st.integers(1, 1 << 20))
def test_prompt_buckets_hold_their_prompt(tokens):
    bucket = prompt_bucket(tokens)
    assert bucket >= tokens and bucket % ROW_MULTIPLE == 0
    assert prompt_bucket(bucket) == bucket
    assert bucket - tokens < max(ROW_MULTIPLE, tokens / 8 + 1)


def test_prompt_buckets_waste_little():
    lengths = np.arange(1024, 131072, 101)
    waste = np.mean([prompt_bucket(int(length)) / length - 1 for length in lengths])
    assert waste <= 0.06


@given(st.integers(1, 4096))
def test_ladder_ends_at_the_bucket(tokens):
    bucket = prompt_bucket(tokens)
    ladder = length_ladder(bucket)
    assert ladder[-1] == bucket and list(ladder) == sorted(set(ladder)) and ladder[0] >= ROW_MULTIPLE
    assert all(high - low <= bucket / 16 + ROW_MULTIPLE for low, high in zip(ladder, ladder[1:], strict=False))


@pytest.mark.parametrize(("requests", "slots"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 16)])
def test_request_slots(requests, slots):
    assert request_bucket(requests) == slots


@pytest.mark.parametrize("meaning", ["position", "kept"])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_attention_pairs(window, meaning):
    positions = np.cumsum(np.random.default_rng(0).integers(1, 4, 50)) - 1
    pairs = 0
    for row in range(50):
        for other in range(row + 1):
            distance = positions[row] - positions[other] if meaning == "position" else row - other
            pairs += window is None or distance < window
    assert attention_pairs(positions, window, meaning) == pairs


def test_llama_cost_by_hand():
    model = read_model_config(
        {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    )
    positions = np.arange(3)
    flops = prefill_flops(model, [positions] * 2, [3, 1], window_meaning="position", scoring=[(2, 3)])
    first = 2 * 8 * (8 + 4 + 4 + 8) * 3 + 4 * 8 * 6
    last = 2 * 8 * (4 + 4) * 3 + 2 * 8 * (8 + 8) + 4 * 8 * 3  # keys and values of all, the rest of one token
    feed_forward = 2 * 3 * 8 * 16
    assert flops["feed_forward"] == feed_forward * 4 and flops["score"] == 2 * 2 * 3 * 8
    assert sum(flops.values()) == first + last + feed_forward * 4 + 2 * 8 * 100 + 2 * 2 * 3 * 8


def test_bytes_of_rows_by_hand():
    model = read_model_config(
        {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    )
    found = prefill_bytes(model, 2, [3, 3], [2, 1], 1, scoring=[(2, 3)], compacted=[2])
    # Rows of 8 (hidden, queries), 4 (keys, values) and 16 (inside the feed-forward); three, and one of the last layer.
    projections = 8 * (8 + 4 + 4)
    items = {
        "embedding": 3 * 2 * 8,
        "norm": 2 * (3 * 8) + 2 * (2 * 8) + 2 * (3 * 8) + 2 * 8,
        "qkv": 2 * projections + 3 * (8 + 8 + 8) + 3 * (8 + 8) + 8,
        "rope": 2 * 3 * (8 + 4) + 2 * (8 + 3 * 4),
        "attention_full": 3 * (8 + 4 + 4 + 8) + (8 + 8) + 3 * (4 + 4),
        "attention_output": 2 * 8 * 8 + 3 * (8 + 8) + (8 + 8),
        "cache_write": 2 * 2 * 3 * (4 + 4),
        "residual": 3 * 8 * (3 + 2 + 1 + 1),
        "feed_forward": 2 * 3 * 8 * 16 + (2 + 1) * (8 + 16 + 16 + 8),
        "score": 3 * 4 + 2 * 8,
        "compact": 2 * 2 * 8,
        "logits": 8 * 100 + 8,
    }
    assert found == {step: 2 * count + (4 * 100 if step == "logits" else 0) for step, count in items.items()}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-12b", "qwen3-next-80b-a3b"])
def test_every_weight_is_read_once(name):
    model = read_model_config(ARCHITECTURES[name])

    def moved(rows: int) -> float:
        every = [rows] * model.num_layers
        return sum(prefill_bytes(model, 2, every, every, 0).values())

    # Without requests the last layer's outputs are none, and what is left of no rows is the weights.
    weights = 2 * moved(1000) - moved(2000)
    stored = 0
    for path, spec in parameter_specs(CausalLM(model, jnp.dtype(jnp.bfloat16))).items():
        looked_up = path.startswith("embedding") and not model.tie_embeddings
        if not looked_up and len(spec.shape) > 1:
            stored += 2 * math.prod(spec.full_shape)
    assert weights == stored


def model(model_type: str, layers: int):
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    return read_model_config(
        {"model_type": model_type, "num_hidden_layers": layers, "num_key_value_heads": 2, "sliding_window": 32} | sizes
    )


@pytest.mark.parametrize(
    ("model_type", "layers", "expected"),
    [
        ("llama", 32, (7, 11, 15, 19, 23, 27)),
        ("llama", 30, (7, 11, 15, 19, 23, 27)),
        ("gemma3_text", 48, (29, 35, 41)),
        ("gemma3_text", 18, (5, 11)),
        ("gemma3_text", 26, (5, 11, 17)),
        ("qwen3_next", 48, tuple(range(7, 44, 4))),
    ],
)
def test_automatic_drop_layers(model_type, layers, expected):
    assert auto_drop_layers(model(model_type, layers)) == expected


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("layers", range(1, 40))
def test_automatic_drop_layers_are_possible(model_type, layers):
    shape = model(model_type, layers)
    chosen = auto_drop_layers(shape)
    assert set(chosen) <= set(shape.full_attention_layers[:-1])
    assert resolve_drop_layers(UniPrefillConfig(drop_layers=chosen), shape) == chosen


def test_impossible_drop_layer_is_named():
    with pytest.raises(ConfigError, match="layer 3 .*possible layers are 5, 11"):
        resolve_drop_layers(UniPrefillConfig(drop_layers=(3,)), model("gemma3_text", 18))
