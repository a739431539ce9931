"""A whole model: embedding, stacked layers by kind, final norm, output head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.config import ModelConfig
from uniprefill_jax.models.decoder_layer import DecoderLayer
from uniprefill_jax.models.gemma3 import gemma3_layer
from uniprefill_jax.models.llama import llama_layer
from uniprefill_jax.models.norms import RMSNorm
from uniprefill_jax.models.parameters import ParameterScope, normal
from uniprefill_jax.models.projection import LayerOfStack
from uniprefill_jax.models.qwen3_next import qwen3_next_layer

LAYER_DECLARATIONS = {"llama": llama_layer, "gemma3": gemma3_layer, "qwen3_next": qwen3_next_layer}

# Tensors that published checkpoints hold and text prefill does not use.
IGNORED_TENSORS = {
    "llama": (r".*\.rotary_emb\.inv_freq$",),
    "gemma3": (r"^(model\.)?(vision_tower|multi_modal_projector)\..*",),
    "qwen3_next": (r"^mtp\..*",),
}


class CausalLM(nnx.Module):
    """Abstract until parameters are loaded; `layers[kind]` holds every layer of a kind, stacked on the leading axis."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        scope = ParameterScope(jnp.dtype(dtype))
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = scope.declare(
            "model.embed_tokens.weight", vocabulary, ("vocab", "embed"), init=normal(config.hidden_size**-0.5)
        )
        declare_layer = LAYER_DECLARATIONS[config.family]
        self.layers = nnx.Dict(
            {
                kind: declare_layer(
                    ParameterScope(jnp.dtype(dtype), "model.layers.{layer}.", config.layers_of_kind(kind)),
                    config,
                    config.layers[config.layers_of_kind(kind)[0]],
                )
                for kind in config.kinds
            }
        )
        self.norm = RMSNorm(
            scope.child("model.norm"),
            config.hidden_size,
            config.rms_norm_eps,
            zero_centred=config.family != "llama",
        )
        embed, vocab = ((config.hidden_size, "embed"),), ((config.vocab_size, "vocab"),)
        self.lm_head = None if config.tie_embeddings else scope.linear("lm_head.weight", embed, vocab)
        self.config = config

    def embed(self, tokens: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Token embeddings, scaled where the family does (the scale rounded to the weights' type, as trained)."""
        with jax.named_scope("embedding"):
            x = self.embedding[...][tokens]
            if self.config.embedding_scale is not None:
                x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
            return x

    def layer(self, kind: str, index: Int32[Array, ""] | int) -> DecoderLayer:
        """One layer of a kind at a (traced) index of its stack: matrices and the weights of norms over whole rows stay
        where they lie, other vectors are cut out."""
        graph, stacked = nnx.split(self.layers[kind])
        index = jnp.asarray(index, jnp.int32)

        def take(variable: nnx.Variable) -> nnx.Variable:
            layer, spec = LayerOfStack(variable.get_value(), index), variable.get_metadata()["spec"]
            return variable.replace(layer if spec.num_inputs or spec.axes == ("embed",) else layer.cut())

        taken = [(path, take(variable)) for path, variable in nnx.to_flat_state(stacked)]
        return nnx.merge(graph, nnx.from_flat_state(taken))

    def logits(self, x: Float[Array, "B D"]) -> Float[Array, "B vocab"]:
        """Final norm and output head, float32."""
        with jax.named_scope("logits"):
            x = self.norm(x)
            if self.lm_head is None:
                return jnp.einsum("be,ve->bv", x, self.embedding[...], preferred_element_type=jnp.float32)
            return jnp.einsum("be,ev->bv", x, self.lm_head[...], preferred_element_type=jnp.float32)


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of checkpoint tensors that a model leaves unused, a tied output head among them."""
    tied = (r"^lm_head\.weight$",) if config.tie_embeddings else ()
    return IGNORED_TENSORS[config.family] + tied
