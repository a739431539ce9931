"""Qwen3-Next layers: Gated DeltaNet or gated full attention, then a dense or mixture-of-experts feed-forward."""

from uniprefill_jax.models.attention import Attention
from uniprefill_jax.models.config import LayerSpec, ModelConfig
from uniprefill_jax.models.decoder_layer import DecoderLayer
from uniprefill_jax.models.feed_forward import FeedForward
from uniprefill_jax.models.gated_delta_net import GatedDeltaNet
from uniprefill_jax.models.mixture import MixtureOfExperts
from uniprefill_jax.models.norms import RMSNorm
from uniprefill_jax.models.parameters import ParameterScope


def qwen3_next_layer(scope: ParameterScope, config: ModelConfig, layer: LayerSpec) -> DecoderLayer:
    """Declare one (stacked) Qwen3-Next layer; its norms are zero-centred but for the gated one inside the mixer."""
    size, eps = config.hidden_size, config.rms_norm_eps
    if layer.mixer == "linear":
        mixer = GatedDeltaNet(scope.child("linear_attn"), config)
    else:
        mixer = Attention(scope.child("self_attn"), config, layer, qk_norm=True, gated=True)
    if layer.feed_forward == "moe" and config.mixture is not None:
        feed_forward = MixtureOfExperts(scope.child("mlp"), size, config.mixture, config.activation)
    else:
        feed_forward = FeedForward(scope.child("mlp"), size, config.intermediate_size, config.activation)
    return DecoderLayer(
        input_norm=RMSNorm(scope.child("input_layernorm"), size, eps, zero_centred=True),
        mixer=mixer,
        feed_forward_norm=RMSNorm(scope.child("post_attention_layernorm"), size, eps, zero_centred=True),
        feed_forward=feed_forward,
    )
