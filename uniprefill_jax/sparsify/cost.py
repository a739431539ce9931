"""The cost model (paper Eq. 11): floating-point operations of one request's prefill, dense and with tokens dropped.

Counted: projections, attention pairs, feed-forward or experts, recurrence, scoring. Not counted: norms, rotary
embedding, softmax, embedding look-up. Of the last layer only keys, values and state are computed for all its tokens;
the rest of it and the output head run for one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from uniprefill_jax.models.config import LayerSpec, ModelConfig


def prefill_flops(
    model: ModelConfig,
    mixer_positions: Sequence[np.ndarray],
    feed_forward_rows: Sequence[int],
    *,
    window_meaning: str,
    scoring: Sequence[tuple[int, int]] = (),
    computed: Mapping[int, float] | None = None,
) -> dict[str, float]:
    """Operations of one request, by the names that the steps have in traces (`jax.named_scope`).

    Args:
        model: the model's shape.
        mixer_positions: for every layer, original positions of the tokens that enter its mixer.
        feed_forward_rows: for every layer, how many tokens enter its feed-forward.
        window_meaning: "position" or "kept", as in the setting.
        scoring: (window rows, tokens scored) of every drop.
        computed: of layers that leave entries of full attention out, the share that they compute. What it takes to
            choose them is not counted.
    """
    shares = computed or {}
    total = defaultdict(float, logits=2.0 * model.hidden_size * model.vocab_size)
    for number, layer in enumerate(model.layers):
        is_last = number == model.num_layers - 1
        positions, rows = mixer_positions[number], feed_forward_rows[number]
        mixer = _linear_flops if layer.mixer == "linear" else _attention_flops
        for step, flops in mixer(model, layer, positions, window_meaning, 1 if is_last else len(positions)).items():
            total[step] += flops * (shares.get(number, 1.0) if step == "attention_full" else 1.0)
        for step, flops in _feed_forward_flops(model, layer).items():
            total[step] += rows * flops
    for window, tokens in scoring:
        total["score"] += 2.0 * window * tokens * model.num_heads * model.head_dim
    return dict(total)


def row_flops(model: ModelConfig, layer: LayerSpec) -> tuple[float, float]:
    """Operations of one row of a layer: without the rows that its attention sees, and for each of these."""
    mixer = _linear_flops if layer.mixer == "linear" else _attention_flops
    steps = [*mixer(model, layer, np.zeros(1), "kept", 1).values(), *_feed_forward_flops(model, layer).values()]
    seen = 0.0 if layer.mixer == "linear" else 4.0 * model.num_heads * model.head_dim
    return sum(steps) - seen, seen


def attention_pairs(positions: np.ndarray, window: int | None, window_meaning: str) -> int:
    """How many (query, key) pairs a causal, possibly windowed, attention over these positions has."""
    return int(_visible(positions, window, window_meaning).sum())


def _visible(positions: np.ndarray, window: int | None, window_meaning: str) -> np.ndarray:
    """How many tokens each token sees."""
    rows = np.arange(len(positions))
    if window is None:
        first = np.zeros_like(rows)
    elif window_meaning == "position":
        first = np.searchsorted(positions, positions - window + 1)
    else:
        first = np.maximum(rows - window + 1, 0)
    return rows - first + 1


def _linear_flops(
    model: ModelConfig, layer: LayerSpec, positions: np.ndarray, window_meaning: str, outputs: int
) -> dict[str, float]:
    """Of a linear-attention mixer, `outputs` of whose rows are asked for."""
    del layer, window_meaning
    shape = model.gated_delta_net
    assert shape is not None
    rows, hidden = len(positions), model.hidden_size
    key_dim = shape.num_key_heads * shape.key_head_dim
    value_dim = shape.num_value_heads * shape.value_head_dim
    return {
        "qkvz": rows * 2.0 * hidden * (2 * key_dim + 2 * value_dim + 2 * shape.num_value_heads),
        "causal_conv": rows * 2.0 * shape.conv_width * (2 * key_dim + value_dim),
        # Per value head and token: read the state with the key, add to it, read it with the query.
        "gated_delta_rule": rows * 6.0 * shape.num_value_heads * shape.key_head_dim * shape.value_head_dim,
        "linear_attention_output": outputs * 2.0 * hidden * value_dim,
    }


def _attention_flops(
    model: ModelConfig, layer: LayerSpec, positions: np.ndarray, window_meaning: str, outputs: int
) -> dict[str, float]:
    """Of a softmax-attention mixer, `outputs` of whose rows are asked for."""
    rows, hidden = len(positions), model.hidden_size
    query_width = model.num_heads * model.head_dim
    gate_width = query_width if model.family == "qwen3_next" else 0
    pairs = _visible(positions, layer.window, window_meaning)[-outputs:].sum()
    keys_values = rows * 4.0 * hidden * model.num_kv_heads * model.head_dim
    return {
        "qkv": keys_values + outputs * 2.0 * hidden * (query_width + gate_width),
        f"attention_{layer.mixer}": 4.0 * query_width * float(pairs),
        "attention_output": outputs * 2.0 * hidden * query_width,
    }


def _feed_forward_flops(model: ModelConfig, layer: LayerSpec) -> dict[str, float]:
    """Of one token."""
    if layer.feed_forward == "dense":
        return {"feed_forward": 6.0 * model.hidden_size * model.intermediate_size}
    shape = model.mixture
    assert shape is not None
    return {
        "router": 2.0 * model.hidden_size * shape.num_experts,
        "experts": 6.0 * model.hidden_size * shape.experts_per_token * shape.expert_size,
        "shared_expert": 2.0 * model.hidden_size * (1 + 3 * shape.shared_expert_size),
    }
