"""From GGUF metadata to a Hugging Face style config, for the llama and gemma3 architectures."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from uniprefill_jax.errors import CheckpointError

# Tokens that end a turn or a text whatever the metadata says; the same list decides when generation stops.
END_TOKENS = (
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
)
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# llama.cpp writes Llama-3.1's frequency factors as a tensor and drops the settings they came from. All published
# checkpoints used these three, so the factor is read off the tensor and the whole is verified against it.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_GEMMA3_27B_LAYERS = 62


class _Metadata:
    """Metadata of one architecture, with errors that name the missing key."""

    def __init__(self, path: Path, architecture: str, values: dict[str, Any]):
        self.path, self.architecture, self.values = path, architecture, values

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.path}: GGUF metadata lacks {self.architecture}.{key}; convert the model again"
            )
        return value

    def decimal(self, key: str, default: float) -> float:
        """A float32 as the shortest decimal that rounds to it: 1e-06, not 9.99999997e-07."""
        return float(str(np.float32(self.get(key, default))))


def synthesise_config(
    path: Path,
    architecture: str,
    values: dict[str, Any],
    vocab_size: int,
    tensor_names: set[str],
    rope_factors: np.ndarray | None,
) -> dict[str, Any]:
    """A config.json for a GGUF file.

    Args:
        path: named in errors.
        architecture: "llama" or "gemma3".
        values: the file's metadata.
        vocab_size: rows of the embedding.
        tensor_names: Hugging Face names of the file's tensors.
        rope_factors: contents of rope_freqs.weight [head_dim / 2], if the file has it.
    """
    metadata = _Metadata(path, architecture, values)
    hidden_size, num_heads = metadata.need("embedding_length"), metadata.need("attention.head_count")
    if metadata.get("expert_count", 0):
        raise CheckpointError(
            f"{path}: {architecture}.expert_count is {metadata.get('expert_count')}; "
            "mixtures of experts are not read from GGUF"
        )
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(metadata.get(key), list):
            raise CheckpointError(f"{path}: {architecture}.{key} differs from layer to layer, which is not supported")
    head_dim = metadata.get("attention.key_length") or metadata.get("rope.dimension_count") or hidden_size // num_heads
    config: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": metadata.need("context_length"),
        "rms_norm_eps": metadata.decimal("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "lm_head.weight" not in tensor_names,
        "attention_bias": any(name.endswith("q_proj.bias") for name in tensor_names),
        **_token_ids(values),
    }
    if metadata.get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{path}: {architecture}.attention.value_length is {metadata.get('attention.value_length')}, "
            f"the keys' is {head_dim}; they must be equal"
        )
    if architecture == "llama":
        return {**config, **_llama_fields(metadata, head_dim, tensor_names, rope_factors)}
    return {**config, **_gemma3_fields(metadata, config)}


def _llama_fields(
    metadata: _Metadata, head_dim: int, tensor_names: set[str], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    rotary = metadata.get("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise CheckpointError(
            f"{metadata.path}: llama.rope.dimension_count is {rotary}, head size is {head_dim}; "
            "partial rotation is not supported"
        )
    theta = metadata.decimal("rope.freq_base", 10000.0)
    scaling = _rope_scaling(metadata)
    if rope_factors is not None:
        scaling = _llama3_scaling(metadata.path, theta, head_dim, rope_factors)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": any(name.endswith("down_proj.bias") for name in tensor_names),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _gemma3_fields(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern = metadata.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        sliding = [bool(layer) for layer in pattern]
    else:
        sliding = [bool((layer + 1) % pattern) for layer in range(num_layers)]
    # As llama.cpp: the 27B scales by the width per head, every other size by the head size.
    scalar = config["hidden_size"] // config["num_attention_heads"] if num_layers == _GEMMA3_27B_LAYERS else head_dim
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding],
        "rope_theta": metadata.decimal("rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.decimal("rope.freq_base_swa", 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping") or None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
    }


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    """rope_scaling as config.json spells it; types this library does not know are passed on for it to refuse."""
    kind = metadata.get("rope.scaling.type")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))
    if kind is None and factor in (None, 0.0, 1.0):
        return None
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": factor}
    original = metadata.get("rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(path: Path, theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """Recover Llama-3.1's scaling from its frequency factors; CheckpointError if they are not of that form."""
    factor = round(float(factors.max()), 4)  # a float32 quotient: 8.000001
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = np.clip(smooth, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError(
            f"{path}: rope_freqs.weight holds frequency factors that are not Llama-3.1's; "
            "load the safetensors checkpoint, whose config.json names the scaling"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _token_ids(values: dict[str, Any]) -> dict[str, Any]:
    """bos, pad and every end-of-text token id that the metadata gives."""
    ids: dict[str, Any] = {}
    for field, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if f"tokenizer.ggml.{key}" in values:
            ids[field] = values[f"tokenizer.ggml.{key}"]
    named = (values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ends = {token_id for token_id in named if token_id is not None}
    tokens = zip(values.get("tokenizer.ggml.tokens", []), values.get("tokenizer.ggml.token_type", []), strict=False)
    ends.update(index for index, (token, kind) in enumerate(tokens) if kind == CONTROL and token in END_TOKENS)
    if ends:
        ids["eos_token_id"] = sorted(ends)
    return ids
