"""The cost model (paper Eq. 11): floating-point operations of one request's prefill, dense and with tokens dropped.

Counted: projections, attention pairs, feed-forward or experts, recurrence, scoring. Not counted: norms, rotary
embedding, softmax, embedding look-up. Of the last layer only keys, values and state are computed for all its tokens;
the rest of it and the output head run for one.
"""

from collections.abc import Sequence

import numpy as np

from uniprefill_jax.models.config import LayerSpec, ModelConfig


def prefill_flops(
    model: ModelConfig,
    mixer_positions: Sequence[np.ndarray],
    feed_forward_rows: Sequence[int],
    *,
    window_meaning: str,
    scoring: Sequence[tuple[int, int]] = (),
) -> float:
    """Operations of one request.

    Args:
        model: the model's shape.
        mixer_positions: for every layer, original positions of the tokens that enter its mixer.
        feed_forward_rows: for every layer, how many tokens enter its feed-forward.
        window_meaning: "position" or "kept", as in the setting.
        scoring: (window rows, tokens scored) of every drop.
    """
    total = 2.0 * model.hidden_size * model.vocab_size
    for number, layer in enumerate(model.layers):
        is_last = number == model.num_layers - 1
        total += _mixer_flops(model, layer, mixer_positions[number], window_meaning, is_last)
        total += feed_forward_rows[number] * _feed_forward_flops(model, layer)
    for window, tokens in scoring:
        total += 2.0 * window * tokens * model.num_heads * model.head_dim
    return total


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


def _mixer_flops(
    model: ModelConfig, layer: LayerSpec, positions: np.ndarray, window_meaning: str, is_last: bool
) -> float:
    rows, hidden = len(positions), model.hidden_size
    outputs = 1 if is_last else rows
    if layer.mixer == "linear":
        shape = model.gated_delta_net
        assert shape is not None
        key_dim = shape.num_key_heads * shape.key_head_dim
        value_dim = shape.num_value_heads * shape.value_head_dim
        inputs = 2.0 * hidden * (2 * key_dim + 2 * value_dim + 2 * shape.num_value_heads)
        conv = 2.0 * shape.conv_width * (2 * key_dim + value_dim)
        # Per value head and token: read the state with the key, add to it, read it with the query.
        recurrence = 6.0 * shape.num_value_heads * shape.key_head_dim * shape.value_head_dim
        return rows * (inputs + conv + recurrence) + outputs * 2.0 * hidden * value_dim
    query_width = model.num_heads * model.head_dim
    gate_width = query_width if model.family == "qwen3_next" else 0
    keys_values = 4.0 * hidden * model.num_kv_heads * model.head_dim
    queries_output = 2.0 * hidden * (2 * query_width + gate_width)
    pairs = _visible(positions, layer.window, window_meaning)[-outputs:].sum()
    return rows * keys_values + outputs * queries_output + 4.0 * query_width * float(pairs)


def _feed_forward_flops(model: ModelConfig, layer: LayerSpec) -> float:
    if layer.feed_forward == "dense":
        return 6.0 * model.hidden_size * model.intermediate_size
    shape = model.mixture
    assert shape is not None
    inner = shape.experts_per_token * shape.expert_size + shape.shared_expert_size
    return 2.0 * model.hidden_size * (shape.num_experts + 1) + 6.0 * model.hidden_size * inner
