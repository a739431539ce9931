"""The least bytes that a prefill moves between memory and the chip, by step: what byte rates in profiles are made of.

Counted: every weight read once, every step's inputs read and outputs written once, for all requests of a batch
together. What a compiler fuses moves less, what has to be read again moves more. Not counted: vectors (the scales of
norms, biases), scores of blocks, positions. As in the cost model, of the last layer only keys, values and state are
computed for all its tokens; the rest of it and the output head run for one per request.
"""

from collections import defaultdict
from collections.abc import Sequence

from uniprefill_jax.models.config import LayerSpec, ModelConfig

FLOAT32 = 4


def prefill_bytes(
    model: ModelConfig,
    itemsize: int,
    mixer_rows: Sequence[int],
    feed_forward_rows: Sequence[int],
    num_requests: int,
    *,
    scoring: Sequence[tuple[int, int]] = (),
    compacted: Sequence[int] = (),
) -> dict[str, float]:
    """Bytes of a batch, by the names that the steps have in traces (`jax.named_scope`).

    Args:
        model: the model's shape.
        itemsize: bytes of a weight or an activation.
        mixer_rows: for every layer, tokens that enter its mixer.
        feed_forward_rows: for every layer, tokens that enter its feed-forward.
        num_requests: prompts of the batch.
        scoring: (window rows, tokens scored) of every drop.
        compacted: tokens that every drop keeps.
    """
    hidden, key_width = model.hidden_size, model.num_kv_heads * model.head_dim
    items: defaultdict[str, float] = defaultdict(float)
    items["embedding"] = 2 * mixer_rows[0] * hidden
    for number, layer in enumerate(model.layers):
        rows, transformed = mixer_rows[number], feed_forward_rows[number]
        outputs = num_requests if number == model.num_layers - 1 else rows
        mixer = _linear if layer.mixer == "linear" else _attention
        norms = 2 if model.family == "gemma3" else 1
        parts = {
            "norm": 2 * hidden * (rows + (norms - 1) * outputs + norms * transformed),
            "residual": 3 * hidden * (outputs + transformed),
        }
        for found in (parts, mixer(model, layer, rows, outputs), _feed_forward(model, layer, transformed)):
            for step, count in found.items():
                items[step] += count
    for window, tokens in scoring:
        items["score"] += tokens * key_width + window * model.num_heads * model.head_dim
    items["compact"] = sum(2 * rows * hidden for rows in compacted)
    items["logits"] = hidden * (model.vocab_size + num_requests)
    total = {step: count * itemsize for step, count in items.items() if count}
    for step, extra in _in_float32(model, mixer_rows, feed_forward_rows, num_requests).items():
        total[step] = total.get(step, 0.0) + FLOAT32 * extra
    return total


def _attention(model: ModelConfig, layer: LayerSpec, rows: int, outputs: int) -> dict[str, float]:
    """Items of a softmax-attention mixer, `outputs` of whose rows are asked for."""
    hidden, queries = model.hidden_size, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    gate = queries if model.family == "qwen3_next" else 0
    found: dict[str, float] = {
        "qkv": hidden * (queries + gate + 2 * keys) + rows * (hidden + 2 * keys) + outputs * (queries + gate),
        "rope": 2 * (outputs * queries + rows * keys),
        f"attention_{layer.mixer}": 2 * outputs * queries + 2 * rows * keys,
        "attention_output": queries * hidden + outputs * (queries + gate + hidden),
        "cache_write": 4 * rows * keys,
    }
    if model.family != "llama":  # the others normalise queries and keys
        found["norm"] = 2 * (outputs * queries + rows * keys)
    return found


def _linear(model: ModelConfig, layer: LayerSpec, rows: int, outputs: int) -> dict[str, float]:
    """Items of a linear-attention mixer, `outputs` of whose rows are asked for."""
    del layer
    shape, hidden = model.gated_delta_net, model.hidden_size
    assert shape is not None
    keys, values = shape.num_key_heads * shape.key_head_dim, shape.num_value_heads * shape.value_head_dim
    projected = 2 * keys + 2 * values + 2 * shape.num_value_heads
    return {
        "qkvz": hidden * projected + rows * (hidden + projected),
        "causal_conv": (shape.conv_width + 2 * rows) * (2 * keys + values),
        "gated_delta_rule": rows * (2 * keys + values) + outputs * values,
        "linear_attention_output": values * hidden + outputs * (2 * values + hidden),
    }


def _feed_forward(model: ModelConfig, layer: LayerSpec, rows: int) -> dict[str, float]:
    hidden = model.hidden_size
    if layer.feed_forward == "dense":
        return {"feed_forward": 3 * hidden * model.intermediate_size + 2 * rows * (hidden + model.intermediate_size)}
    shape = model.mixture
    assert shape is not None
    chosen = rows * shape.experts_per_token
    return {
        "router": hidden * shape.num_experts + rows * hidden,
        # Few rows choose few experts; many are taken to choose all.
        "experts": 3 * min(shape.num_experts, chosen) * hidden * shape.expert_size
        + 2 * (rows * hidden + chosen * shape.expert_size),
        "shared_expert": hidden * (3 * shape.shared_expert_size + 1) + 2 * rows * (hidden + shape.shared_expert_size),
    }


def _in_float32(
    model: ModelConfig, mixer_rows: Sequence[int], feed_forward_rows: Sequence[int], num_requests: int
) -> dict[str, float]:
    """Items that are float32 whatever the model's type: logits, gates and states of the recurrence, router logits."""
    items: defaultdict[str, float] = defaultdict(float, logits=num_requests * model.vocab_size)
    for layer, rows, transformed in zip(model.layers, mixer_rows, feed_forward_rows, strict=True):
        shape = model.gated_delta_net
        if layer.mixer == "linear" and shape is not None:
            states = num_requests * shape.num_value_heads * shape.key_head_dim * shape.value_head_dim
            items["gated_delta_rule"] += 2 * rows * shape.num_value_heads + states
        if layer.feed_forward != "dense" and model.mixture is not None:
            items["router"] += transformed * model.mixture.num_experts
    return items
