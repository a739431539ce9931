"""A Hugging Face config.json, read with plain json, becomes a ModelConfig: everything a model needs, said once.

Old and new spellings are accepted: `rope_theta` + `rope_scaling` or `rope_parameters` (flat, or nested per layer type),
`layer_types` or `sliding_window_pattern` / `full_attention_interval`, a nested `text_config`, a missing `head_dim`.
Whatever is not understood is an error that names it.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from uniprefill_jax.errors import ConfigError

MixerKind = Literal["full", "sliding", "linear"]
FeedForwardKind = Literal["dense", "moe"]

FAMILIES = {
    "llama": "llama",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "qwen3_next": "qwen3_next",
}
LAYER_TYPES: dict[str, MixerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer type: base, how many of a head's dimensions turn, and the length scaling."""

    theta: float
    rotary_dim: int
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """One layer: which token mixer, which feed-forward, and the mixer's window and rotary embedding."""

    mixer: MixerKind
    feed_forward: FeedForwardKind
    rope: RopeConfig | None = None
    window: int | None = None

    @property
    def kind(self) -> str:
        """Layers of one kind share code and are stacked."""
        return f"{self.mixer}_{self.feed_forward}"


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Shapes of a Gated DeltaNet mixer."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class MixtureConfig:
    """Shapes of a mixture of experts with one shared expert."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    normalise_top_k: bool


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. `attention_scale` multiplies q.k; `embedding_scale` multiplies token embeddings."""

    family: Literal["llama", "gemma3", "qwen3_next"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    attention_bias: bool
    mlp_bias: bool
    activation: str
    rms_norm_eps: float
    max_position: int
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    embedding_scale: float | None = None
    gated_delta_net: GatedDeltaNetConfig | None = None
    mixture: MixtureConfig | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct layer kinds, in order of first appearance."""
        return tuple(dict.fromkeys(layer.kind for layer in self.layers))

    def layers_of_kind(self, kind: str) -> tuple[int, ...]:
        """Layer numbers of one kind, rising."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kind == kind)

    def index_in_kind(self, layer: int) -> int:
        """Where a layer sits among the layers of its kind."""
        return self.layers_of_kind(self.layers[layer].kind).index(layer)

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        """Layers in which every query sees all earlier tokens: where tokens may be scored and dropped."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.mixer == "full")


class _Fields:
    """A config.json's fields, with errors that name the field."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"config.json: {name} is missing; this model cannot be built without it")
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"config.json: {name} is {value!r}; expected an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"config.json: {name} is {value!r}; expected a number")
        return float(value)


def read_model_config(config: dict[str, Any]) -> ModelConfig:
    """Read a config.json's contents; raises ConfigError naming what is unknown, missing or inconsistent."""
    if not isinstance(config, dict):
        raise ConfigError(f"config.json: expected an object, found {type(config).__name__}")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type is {model_type!r}, which is not supported; supported are {', '.join(FAMILIES)}"
        )
    if isinstance(config.get("text_config"), dict):
        outer = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        config = {**outer, **config["text_config"]}
    fields = _Fields(config)
    family = FAMILIES[model_type]
    if family == "llama":
        return _read_llama(fields)
    if family == "gemma3":
        return _read_gemma3(fields)
    return _read_qwen3_next(fields)


def _read_llama(fields: _Fields) -> ModelConfig:
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", hidden_size // num_heads)
    rope = _read_rope(fields, head_dim, None, 10000.0)
    layer = LayerSpec("full", "dense", rope)
    layer_types = fields.get("layer_types")
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise ConfigError(
            f"config.json: layer_types of a llama model are {sorted(set(layer_types))}; only full_attention is known"
        )
    return ModelConfig(
        family="llama",
        activation=_read_activation(fields, "hidden_act", "silu"),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=bool(fields.get("mlp_bias", False)),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        layers=(layer,) * fields.size("num_hidden_layers"),
        **_common_sizes(fields, num_heads, 1e-6, 2048),
    )


def _read_gemma3(fields: _Fields) -> ModelConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.get(name):
            raise ConfigError(f"config.json: {name} is {fields.get(name)!r}; Gemma-3 text models leave it unset")
    num_layers = fields.size("num_hidden_layers", 26)
    head_dim = fields.size("head_dim", 256)
    window = fields.size("sliding_window", 4096)
    pattern = fields.size("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
    default_types = [
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(num_layers)
    ]
    specs = {
        "full_attention": LayerSpec("full", "dense", _read_rope(fields, head_dim, "full_attention", 1e6)),
        "sliding_attention": LayerSpec(
            "sliding", "dense", _read_rope(fields, head_dim, "sliding_attention", 10000.0), window
        ),
    }
    hidden_size = fields.size("hidden_size", 2304)
    return ModelConfig(
        family="gemma3",
        activation=_read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        head_dim=head_dim,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=False,
        tie_embeddings=bool(fields.get("tie_word_embeddings", True)),
        layers=_read_layers(fields, num_layers, default_types, specs),
        embedding_scale=math.sqrt(hidden_size),
        **_common_sizes(
            fields, fields.size("num_attention_heads", 8), 1e-6, 131072, kv_heads=4, vocab=262208, hidden=2304, mlp=9216
        ),
    )


def _read_qwen3_next(fields: _Fields) -> ModelConfig:
    num_layers = fields.size("num_hidden_layers", 48)
    head_dim = fields.size("head_dim", 256)
    interval = fields.size("full_attention_interval", 4)
    default_types = [
        "full_attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(num_layers)
    ]
    specs = {
        "full_attention": LayerSpec("full", "moe", _read_rope(fields, head_dim, None, 10000.0, 0.25)),
        "linear_attention": LayerSpec("linear", "moe"),
    }
    mixers = _read_layers(fields, num_layers, default_types, specs)
    num_experts = fields.size("num_experts", 512, minimum=0)
    step = fields.size("decoder_sparse_step", 1)
    dense_layers = fields.get("mlp_only_layers", [])
    layers = tuple(
        layer
        if num_experts > 0 and index not in dense_layers and (index + 1) % step == 0
        else LayerSpec(layer.mixer, "dense", layer.rope)
        for index, layer in enumerate(mixers)
    )
    gated_delta_net = GatedDeltaNetConfig(
        num_key_heads=fields.size("linear_num_key_heads", 16),
        num_value_heads=fields.size("linear_num_value_heads", 32),
        key_head_dim=fields.size("linear_key_head_dim", 128),
        value_head_dim=fields.size("linear_value_head_dim", 128),
        conv_width=fields.size("linear_conv_kernel_dim", 4, minimum=2),
    )
    if gated_delta_net.num_value_heads % gated_delta_net.num_key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads is {gated_delta_net.num_value_heads}, not a multiple of "
            f"linear_num_key_heads ({gated_delta_net.num_key_heads})"
        )
    mixture = MixtureConfig(
        num_experts=num_experts,
        experts_per_token=fields.size("num_experts_per_tok", 10),
        expert_size=fields.size("moe_intermediate_size", 512),
        shared_expert_size=fields.size("shared_expert_intermediate_size", 512),
        normalise_top_k=bool(fields.get("norm_topk_prob", True)),
    )
    if num_experts and mixture.experts_per_token > num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {mixture.experts_per_token}, more than num_experts ({num_experts})"
        )
    return ModelConfig(
        family="qwen3_next",
        activation=_read_activation(fields, "hidden_act", "silu"),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=False,
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        layers=layers,
        gated_delta_net=gated_delta_net,
        mixture=mixture if any(layer.feed_forward == "moe" for layer in layers) else None,
        **_common_sizes(
            fields, fields.size("num_attention_heads", 16), 1e-6, 32768, kv_heads=2, vocab=151936, hidden=2048, mlp=5632
        ),
    )


def _common_sizes(
    fields: _Fields,
    num_heads: int,
    eps: float,
    max_position: int,
    kv_heads: int | None = None,
    vocab: int | None = None,
    hidden: int | None = None,
    mlp: int | None = None,
) -> dict[str, Any]:
    num_kv_heads = fields.size("num_key_value_heads", kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads is {num_heads}, not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    return dict(
        vocab_size=fields.size("vocab_size", vocab),
        hidden_size=fields.size("hidden_size", hidden),
        intermediate_size=fields.size("intermediate_size", mlp),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        max_position=fields.size("max_position_embeddings", max_position),
    )


def _read_layers(
    fields: _Fields, num_layers: int, default_types: list[str], specs: dict[str, LayerSpec]
) -> tuple[LayerSpec, ...]:
    layer_types = fields.get("layer_types", default_types)
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types lists {len(layer_types)} layers, but num_hidden_layers is {num_layers}"
        )
    for layer_type in layer_types:
        if layer_type not in specs:
            raise ConfigError(
                f"config.json: layer type {layer_type!r} in layer_types is unknown here; known are {', '.join(specs)}"
            )
    return tuple(specs[layer_type] for layer_type in layer_types)


def _read_activation(fields: _Fields, name: str, default: str) -> str:
    activation = fields.get(name, default)
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: {name} is {activation!r}, which is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return activation


def _read_rope(
    fields: _Fields, head_dim: int, layer_type: str | None, default_theta: float, default_partial: float = 1.0
) -> RopeConfig:
    """Rotary settings of one layer type (None where a model has one kind), from either spelling."""
    parameters = fields.get("rope_parameters")
    source = "rope_parameters"
    if parameters is not None:
        nested = any(isinstance(value, dict) for value in parameters.values())
        scaling = (parameters.get(layer_type) or {}) if nested else parameters
        theta = scaling.get("rope_theta")
        if theta is None:
            theta = fields.number("rope_theta", default_theta) if layer_type != "sliding_attention" else default_theta
        if not nested and layer_type == "sliding_attention":
            # A flat spelling describes the global layers; local layers turn with their own base and no scaling.
            scaling, theta = {}, fields.number("rope_local_base_freq", default_theta)
    elif layer_type == "sliding_attention":
        scaling, theta = {}, fields.number("rope_local_base_freq", default_theta)
    else:
        source = "rope_scaling"
        scaling, theta = fields.get("rope_scaling", {}), fields.number("rope_theta", default_theta)
    partial = scaling.get("partial_rotary_factor") or fields.number("partial_rotary_factor", default_partial)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"config.json: partial_rotary_factor {partial} of head_dim {head_dim} is not an even number")
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type == "default":
        return RopeConfig(float(theta), rotary_dim)
    if rope_type not in ("linear", "llama3"):
        raise ConfigError(
            f"config.json: rope type {rope_type!r} in {source} is not supported; supported are default, linear, llama3"
        )
    factor = _rope_number(scaling, source, "factor")
    if rope_type == "linear":
        return RopeConfig(float(theta), rotary_dim, "linear", factor)
    return RopeConfig(
        theta=float(theta),
        rotary_dim=rotary_dim,
        scaling="llama3",
        factor=factor,
        low_frequency_factor=_rope_number(scaling, source, "low_freq_factor"),
        high_frequency_factor=_rope_number(scaling, source, "high_freq_factor"),
        original_max_position=int(_rope_number(scaling, source, "original_max_position_embeddings")),
    )


def _rope_number(scaling: dict[str, Any], source: str, name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config.json: {source} has {name} {value!r}; expected a positive number")
    return float(value)
