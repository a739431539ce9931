"""The library's model over a batch of sequences of one length, such that it can be differentiated.

The layers, their parameters and their order are the library's; what its kernels compute for packed, ragged rows goes
through their seams (`attend_with`, `recur_with`, `transform_with`) to operations of static shape that have gradients.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.gated_delta_rule import gated_delta_rule_equal_lengths
from pallas_kernels.grouped_matmul import ACTIVATIONS
from uniprefill_jax.models.attention import Attention
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.decoder_layer import DecoderLayer
from uniprefill_jax.models.gated_delta_net import GatedDeltaNet
from uniprefill_jax.models.layer_loop import LayerIndex, group_layers, index_table, loop_layers
from uniprefill_jax.models.mixture import MixtureOfExperts
from uniprefill_jax.models.projection import matrix
from uniprefill_jax.models.rope import rope_table


class Rows(NamedTuple):
    """A batch of sequences of one length, one after another along one axis.

    Attributes:
        positions: position of every row in its sequence before anything was dropped.
        batch: number of sequences.
    """

    positions: Int32[Array, " T"]
    batch: int

    def split(self, x: Float[Array, "T *rest"]) -> Float[Array, "B L *rest"]:
        """Sequences on an axis of their own."""
        return x.reshape(self.batch, -1, *x.shape[1:])

    def starts(self) -> Int32[Array, " T"]:
        """First row of every row's sequence."""
        length = self.positions.shape[0] // self.batch
        return jnp.arange(self.positions.shape[0], dtype=jnp.int32) // length * length


class Mixed(NamedTuple):
    """Hidden states after a token mixer, and the queries and keys of an attention layer."""

    x: Float[Array, "T D"]
    queries: Float[Array, "T H d"] | None
    keys: Float[Array, "T KV d"] | None


def hidden_states(model: CausalLM, tokens: Int32[Array, "B L"]) -> tuple[Float[Array, "B*L D"], Float[Array, ""]]:
    """The rows that go into the output head, and the mean over layers of `load_balance`."""
    batch, length = tokens.shape
    rows = Rows(jnp.tile(jnp.arange(length, dtype=jnp.int32), batch), batch)
    kinds = [layer.kind for layer in model.config.layers]
    table = index_table(kinds)

    def layer(kind: str, number: LayerIndex, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, balance = carry
        module = model.layer(kind, table[number])
        x, added = transform(module, mix(module, x, rows).x)
        return x, balance + added

    carry = (_embed(model, tokens.reshape(-1)), jnp.zeros((), jnp.float32))
    x, balance = loop_layers(group_layers(kinds), 0, layer, carry)
    return x, balance / len(kinds)


def mix(module: DecoderLayer, x: Float[Array, "T D"], rows: Rows) -> Mixed:
    """The token mixer's sub-layer: causal within each sequence."""
    mixer = module.mixer
    if isinstance(mixer, GatedDeltaNet):
        rule = partial(_rule, rows)
        x, _ = module.mix_with(x, lambda normed: (mixer.recur_with(normed, rows.starts(), rule), None))
        return Mixed(x, None, None)

    def attend(queries: Array, keys: Array, values: Array) -> tuple[Array, tuple[Array, Array]]:
        with jax.named_scope("attention_full"):
            return _attend(mixer, queries, keys, values, rows), (queries, keys)

    table = rope_table(mixer.rope, rows.positions)
    x, (queries, keys) = module.mix_with(x, lambda normed: mixer.attend_with(normed, table, attend))
    return Mixed(x, queries, keys)


def transform(module: DecoderLayer, x: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], Float[Array, ""]]:
    """The feed-forward sub-layer, and how unevenly it loads its experts (0 where it has none)."""
    feed_forward = module.feed_forward
    if isinstance(feed_forward, MixtureOfExperts):
        return module.transform_with(x, partial(_all_experts, feed_forward))
    return module.transform_with(x, lambda normed: (feed_forward(normed), jnp.zeros((), jnp.float32)))


def _embed(model: CausalLM, tokens: Int32[Array, " T"]) -> Float[Array, "T D"]:
    """Token embeddings as a product, whose gradient is one too: a gather's adds up colliding rows in bfloat16."""
    table = model.embed(jnp.arange(model.config.vocab_size, dtype=jnp.int32))
    return jnp.dot(jax.nn.one_hot(tokens, table.shape[0], dtype=table.dtype), table)


def _attend(
    mixer: Attention,
    queries: Float[Array, "T H d"],
    keys: Float[Array, "T KV d"],
    values: Float[Array, "T KV d"],
    rows: Rows,
) -> Float[Array, "T H d"]:
    # Elsewhere all scores of a sequence are held at once, which serves the short ones of tests.
    cudnn = jax.default_backend() == "gpu" and queries.dtype in (jnp.bfloat16, jnp.float16)
    output = jax.nn.dot_product_attention(
        rows.split(queries),
        rows.split(keys),
        rows.split(values),
        scale=mixer.scale,
        is_causal=True,
        implementation="cudnn" if cudnn else "xla",
    )
    return output.reshape(queries.shape)


def _rule(rows: Rows, *arguments: Array) -> Float[Array, "T Hv dv"]:
    output = gated_delta_rule_equal_lengths(*(rows.split(argument) for argument in arguments))
    return output.reshape(-1, *output.shape[2:])


def _all_experts(module: MixtureOfExperts, x: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], Float[Array, ""]]:
    """Every expert for every row, those not chosen with weight 0: for few experts the cheapest way with gradients."""
    routing = module.route(x)
    with jax.named_scope("experts"):
        chosen = jax.nn.one_hot(routing.experts, module.config.num_experts, dtype=jnp.float32)
        weights = jnp.einsum("tc,tce->te", routing.weights, chosen)
        gate, up, down = (matrix(weight) for weight in (module.gate_proj, module.up_proj, module.down_proj))
        inner = ACTIVATIONS[module.activation](jnp.einsum("td,edf->tef", x, gate)) * jnp.einsum("td,edf->tef", x, up)
        mixed = jnp.einsum("tef,efd->td", (inner * weights[..., None]).astype(x.dtype), down)
    return module.add_shared(x, mixed), load_balance(routing.probabilities, chosen.mean(axis=1))


def load_balance(probabilities: Float[Array, "T experts"], share: Float[Array, "T experts"]) -> Float[Array, ""]:
    """Experts x sum over them of (share of choices) x (mean probability): 1 when even (Fedus et al., 2101.03961)."""
    return probabilities.shape[1] * (probabilities.mean(axis=0) * share.mean(axis=0)).sum()
