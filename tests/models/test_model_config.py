"""Reading config.json: old and new spellings give the same model, and what is unknown is named."""

import json
from pathlib import Path

import pytest

from uniprefill_jax.errors import ConfigError
from uniprefill_jax.models.config import read_model_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 64}


def test_missing_sizes_are_derived():
    model = read_model_config(LLAMA)
    assert model.head_dim == 16 and model.num_kv_heads == 4 and not model.tie_embeddings
    assert model.attention_scale == pytest.approx(0.25)


def test_rope_spellings_agree():
    old = read_model_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}})
    older = read_model_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}})
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}
    new = read_model_config({**LLAMA, "rope_parameters": parameters})
    assert old == older == new
    assert old.layers[0].rope is not None and old.layers[0].rope.scaling == "llama3"


def test_gemma_rope_scales_global_layers_only():
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read_model_config(
        {**GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling, "sliding_window_pattern": 4}
    )
    layer_types = ["full_attention" if (index + 1) % 4 == 0 else "sliding_attention" for index in range(8)]
    new = read_model_config(
        {
            **GEMMA,
            "layer_types": layer_types,
            "rope_parameters": {
                "full_attention": {**scaling, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert old == new
    sliding, full = old.layers[0], old.layers[3]
    assert sliding.rope is not None and (sliding.rope.theta, sliding.rope.scaling, sliding.window) == (
        1e4,
        "default",
        64,
    )
    assert full.rope is not None and (full.rope.theta, full.rope.factor, full.window) == (1e6, 8.0, None)


def test_nested_text_config_takes_published_defaults():
    model = read_model_config(
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}, "vision_config": {}}
    )
    assert (model.num_layers, model.num_heads, model.head_dim, model.vocab_size) == (26, 8, 256, 262208)
    assert model.full_attention_layers == (5, 11, 17, 23) and model.tie_embeddings


def test_published_configs():
    published = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
    models = {name: read_model_config(config) for name, config in published.items()}
    families = {model.family for model in models.values()}
    assert families == {"llama", "gemma3", "qwen3_next"}
    qwen = next(model for model in models.values() if model.family == "qwen3_next")
    assert qwen.full_attention_layers == tuple(range(3, 48, 4))
    assert qwen.layers[3].rope is not None and qwen.layers[3].rope.rotary_dim == 64


def test_qwen_dense_layers():
    base = {"model_type": "qwen3_next", "num_hidden_layers": 6}
    stepped = read_model_config({**base, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [layer.feed_forward for layer in stepped.layers] == ["dense", "moe", "dense", "dense", "dense", "moe"]
    assert read_model_config({**base, "num_experts": 0}).mixture is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "model_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "four"}, "four"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
    ],
)
def test_unknown_or_wrong_fields_are_named(change, named):
    with pytest.raises(ConfigError, match=named) as caught:
        read_model_config({**LLAMA, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 7 + ["chunked_attention"]}, "chunked_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_wrong_gemma_fields_are_named(change, named):
    with pytest.raises(ConfigError, match=named):
        read_model_config({**GEMMA, **change})
