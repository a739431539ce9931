"""Tiny checkpoint files: safetensors, sharded folders, GGUF files, and whole small models in either."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from checkpoints_convert.load import _tensor_names
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import parameter_specs

DTYPE_NAMES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "vocab_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
GEMMA_CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 48,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 32,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file with the tensors in the order given."""
    entries, data = {}, b""
    for name, array in tensors.items():
        start = len(data)
        data += array.tobytes()
        entries[name] = {
            "dtype": DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, len(data)],
        }
    write_raw_safetensors(path, json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode(), data)


def write_raw_safetensors(path: Path, header: bytes, data: bytes) -> None:
    """A file with any header and buffer, right or wrong."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A Hugging Face folder, the tensors dealt out over the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        write_safetensors(folder / file, part)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def model_tensors(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors for every name a model of this config reads."""
    generator = np.random.default_rng(seed)
    specs = parameter_specs(CausalLM(read_model_config(config), jnp.dtype(jnp.float32)))
    return {
        name: generator.standard_normal(spec.file_shape).astype(np.float32).astype(dtype)
        for spec in specs.values()
        for name in _tensor_names(spec)
    }


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder a head's rows as the converter from Hugging Face to GGUF does for llama's q and k."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str, architecture: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, "output.weight")
    _, _, layer, *module, suffix = name.split(".")
    part = ".".join(module)
    if part == "post_attention_layernorm":
        return f"blk.{layer}.{'ffn_norm' if architecture == 'llama' else 'post_attention_norm'}.{suffix}"
    return f"blk.{layer}.{_GGUF_PARTS[part]}.{suffix}"


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file of a Hugging Face model, converted as llama.cpp's script does.

    `metadata` adds or replaces keys (None leaves one out); `extra` adds tensors under GGUF names; `kinds` picks the
    storage of tensors by Hugging Face name.
    """
    architecture = "llama" if config["model_type"] == "llama" else "gemma3"
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if architecture == "gemma3":
        keys["attention.key_length"] = keys["attention.value_length"] = config["head_dim"]
        keys["attention.sliding_window"] = config["sliding_window"]
    else:
        keys["rope.dimension_count"] = config["head_dim"]
    fields = {f"{architecture}.{key}": value for key, value in keys.items()}
    fields["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
    fields.update(metadata or {})
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", architecture))
    for key, value in fields.items():
        if value is not None:
            add_field(writer, key, value)
    for name, array in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            array = interleave_halves(array, config[heads])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        kind = (kinds or {}).get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(gguf_name(name, architecture), gguf.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add one metadata value with the type that llama.cpp gives its kind."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
