"""Small random models of each family and their prompts, described once for the oracle and for the tests.

Plain Python and numpy: the oracle's interpreter reads it too. Sizes are odd on purpose (no two dimensions of a model
are equal if they can differ), so that a transposed or swapped dimension cannot go unseen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

NEW_TOKENS = 32


@dataclass(frozen=True)
class SmallModel:
    """A model's config.json values and the lengths of the prompts it is run on."""

    config: dict
    lengths: tuple[int, ...]
    seed: int
    tags: tuple[str, ...] = field(default=())


_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GEMMA = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN = {
    "model_type": "qwen3_next",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "linear_conv_kernel_dim": 4,
}

SMALL_MODELS: dict[str, SmallModel] = {
    "llama-plain": SmallModel(
        _LLAMA
        | {
            "vocab_size": 211,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        lengths=(640, 641, 703),
        seed=1,
    ),
    # The RoPE knee (original_max_position_embeddings) lies far below the prompts' lengths.
    "llama-scaled": SmallModel(
        _LLAMA
        | {
            "vocab_size": 307,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
        lengths=(640, 641, 703),
        seed=2,
    ),
    "gemma-regular": SmallModel(
        _GEMMA
        | {
            "vocab_size": 223,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 14,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 48,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        lengths=(640, 641, 703),
        seed=3,
    ),
    "gemma-irregular": SmallModel(
        _GEMMA
        | {
            "vocab_size": 257,
            "hidden_size": 72,
            "intermediate_size": 96,
            "num_hidden_layers": 8,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "sliding_window": 65,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
        lengths=(640, 641, 703),
        seed=44,
    ),
    "qwen3-next": SmallModel(
        _QWEN
        | {
            "vocab_size": 229,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0, "partial_rotary_factor": 0.25},
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        lengths=(640, 641, 703),
        seed=5,
    ),
    "qwen3-irregular": SmallModel(
        _QWEN
        | {
            "vocab_size": 241,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 7,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
            "mlp_only_layers": [1, 3],
            "layer_types": [
                "full_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
                "full_attention",
            ],
            "tie_word_embeddings": True,
        },
        lengths=(640, 641, 703),
        seed=6,
    ),
}


def make_prompt(vocab_size: int, length: int, seed: int) -> np.ndarray:
    """Token ids whose mix changes every few dozen tokens, so that blocks of the prompt differ in what they attract."""
    random = np.random.default_rng([seed, length])
    prompt = np.empty(length, np.int64)
    start = 0
    while start < length:
        stop = min(length, start + int(random.integers(24, 120)))
        few = random.integers(0, vocab_size, size=int(random.integers(3, 40)))
        prompt[start:stop] = random.choice(few, stop - start)
        start = stop
    return prompt


def small_prompts(name: str) -> list[np.ndarray]:
    """The prompts of one small model."""
    model = SMALL_MODELS[name]
    return [make_prompt(model.config["vocab_size"], length, model.seed) for length in model.lengths]
