"""Tensor names: one Hugging Face spelling for text models, and where GGUF tensors go in it."""

import re

# Multimodal checkpoints nest the text model; both orders of nesting exist.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER = {
    "llama": {**_GGUF_PROJECTIONS, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        **_GGUF_PROJECTIONS,
        "attn_norm": "input_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
GGUF_ARCHITECTURES = tuple(_GGUF_LAYER)

_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def text_model_name(name: str) -> str:
    """A tensor's name with the text model's nesting taken off; other names are unchanged."""
    for nested, plain in _TEXT_PREFIXES:
        if name.startswith(nested):
            return plain + name.removeprefix(nested)
    return name


def gguf_to_hugging_face(architecture: str, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None if the architecture has no such tensor."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    block = _GGUF_BLOCK.fullmatch(name)
    if block is None:
        return None
    layer, part, suffix = block.groups()
    module = _GGUF_LAYER[architecture].get(part)
    return None if module is None else f"model.layers.{layer}.{module}.{suffix}"
