"""Llama layers: pre-norm attention and feed-forward. Serves any Llama-architecture checkpoint."""

from uniprefill_jax.models.attention import Attention
from uniprefill_jax.models.config import LayerSpec, ModelConfig
from uniprefill_jax.models.decoder_layer import DecoderLayer
from uniprefill_jax.models.feed_forward import FeedForward
from uniprefill_jax.models.norms import RMSNorm
from uniprefill_jax.models.parameters import ParameterScope


def llama_layer(scope: ParameterScope, config: ModelConfig, layer: LayerSpec) -> DecoderLayer:
    """Declare one (stacked) Llama layer."""
    size, eps = config.hidden_size, config.rms_norm_eps
    return DecoderLayer(
        input_norm=RMSNorm(scope.child("input_layernorm"), size, eps),
        mixer=Attention(scope.child("self_attn"), config, layer),
        feed_forward_norm=RMSNorm(scope.child("post_attention_layernorm"), size, eps),
        feed_forward=FeedForward(
            scope.child("mlp"), size, config.intermediate_size, config.activation, config.mlp_bias
        ),
    )
