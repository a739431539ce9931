"""Gemma-3 text layers: QK-norm attention (sliding or full) and feed-forward, each between two zero-centred norms."""

from uniprefill_jax.models.attention import Attention
from uniprefill_jax.models.config import LayerSpec, ModelConfig
from uniprefill_jax.models.decoder_layer import DecoderLayer
from uniprefill_jax.models.feed_forward import FeedForward
from uniprefill_jax.models.norms import RMSNorm
from uniprefill_jax.models.parameters import ParameterScope


def gemma3_layer(scope: ParameterScope, config: ModelConfig, layer: LayerSpec) -> DecoderLayer:
    """Declare one (stacked) Gemma-3 layer."""

    def norm(name: str) -> RMSNorm:
        return RMSNorm(scope.child(name), config.hidden_size, config.rms_norm_eps, zero_centred=True)

    return DecoderLayer(
        input_norm=norm("input_layernorm"),
        mixer=Attention(scope.child("self_attn"), config, layer, qk_norm=True),
        mixer_output_norm=norm("post_attention_layernorm"),
        feed_forward_norm=norm("pre_feedforward_layernorm"),
        feed_forward=FeedForward(scope.child("mlp"), config.hidden_size, config.intermediate_size, config.activation),
        feed_forward_output_norm=norm("post_feedforward_layernorm"),
    )
