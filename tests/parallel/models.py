"""Tiny models of every family whose heads, experts and vocabulary eight shards divide; two have fewer KV heads."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints.builders import model_tensors, write_folder

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_attention_heads": 8,
}
_QWEN: dict[str, Any] = _COMMON | {
    "model_type": "qwen3_next",
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    "gemma": _COMMON
    | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": 96,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    "qwen": _QWEN,
    "qwen-deep": _QWEN | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}
# A small window and small blocks, so that short prompts lose tokens.
_SMALL: dict[str, Any] = {"block_size": 16, "sink_tokens": 16, "window_tokens": 24}
_PEAK: dict[str, Any] = {"top_p": 0.7, "score": "peak", "score_memory": 0.5, "top_p_over": "candidates"}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"drop_layers": (0, 1), "top_p": 0.7},
    "gemma": _SMALL | {"drop_layers": (0,), "top_p": 0.7, "dropped_tokens": "carry"},
    "qwen": _SMALL | _PEAK | {"drop_layers": (0,)},
    "qwen-deep": _SMALL | _PEAK | {"drop_layers": (1,)},
}


def write_checkpoint(folder: Path, name: str) -> Path:
    """A model's Hugging Face folder, in three shard files."""
    tensors = {
        tensor: values / np.sqrt(values.shape[-1], dtype=np.float32) if values.ndim > 1 else 1 + values / 10
        for tensor, values in model_tensors(CONFIGS[name], seed=3).items()
    }
    return write_folder(folder, CONFIGS[name], tensors, shards=3)
