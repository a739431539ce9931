"""The model that is trained: its config.json, and parameters to start from."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from training.vocabulary import VOCABULARY_SIZE
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import initialise

# Every second layer is full attention: five of them, of which the first four can drop tokens. A linear layer of four
# small states comes before the first, so that an answer has to be looked up by attention, and mostly after it.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 5,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
_BRANCH_OUTPUTS = ("o_proj", "out_proj", "down_proj")
_BRANCH_SCALE = 0.1
_HEAD_NORM = 0.4  # as declared, one more than this multiplies each of query and key
_TIME_STEPS = (1e-3, 1e-1)
_DECAY_RATES = (1.0, 16.0)


def make_model(config: dict[str, Any]) -> CausalLM:
    """The abstract model in the type that it computes in and is saved in, bfloat16."""
    return CausalLM(read_model_config(config), jnp.dtype(jnp.bfloat16))


def initial_parameters(config: dict[str, Any], seed: int) -> dict[str, jax.Array]:
    """Float32 parameters by path, as declared but for three things.

    What the branches add begins small beside the embeddings, which are to be copied. Attention can single out one of
    thousands of tokens from the start. The recurrent layers forget over tens to a thousand tokens (time steps and rates
    as of Yang et al., arXiv 2412.06464), not at once.
    """
    declared = CausalLM(read_model_config(config), jnp.dtype(jnp.float32))
    parameters = initialise(declared, seed)
    keys = jax.random.split(jax.random.key(seed), 2)
    for path, value in parameters.items():
        name = path.rsplit(".", 1)[-1]
        if name in _BRANCH_OUTPUTS:
            parameters[path] = value * _BRANCH_SCALE
        elif path.endswith(("q_norm.weight", "k_norm.weight")):
            parameters[path] = value + _HEAD_NORM
        elif name == "dt_bias":
            low, high = (math.log(step) for step in _TIME_STEPS)
            step = jnp.exp(jax.random.uniform(keys[0], value.shape, jnp.float32, low, high))
            parameters[path] = step + jnp.log(-jnp.expm1(-step))  # softplus of this is the step
        elif name == "a_log":
            parameters[path] = jnp.log(jax.random.uniform(keys[1], value.shape, jnp.float32, *_DECAY_RATES))
    return parameters


def count_parameters(parameters: dict[str, jax.Array]) -> int:
    """Numbers in all parameters."""
    return sum(value.size for value in parameters.values())
