"""A decoder layer of any family: token mixer and feed-forward, each in a residual branch between norms."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from uniprefill_jax.models.attention import Attended, Attention, AttentionCache, AttentionStep
from uniprefill_jax.models.batch import PackedRows
from uniprefill_jax.models.feed_forward import FeedForward
from uniprefill_jax.models.gated_delta_net import GatedDeltaNet, RecurrentCache
from uniprefill_jax.models.mixture import MixtureOfExperts
from uniprefill_jax.models.norms import RMSNorm, add_residual


class DecoderLayer(nnx.Module):
    """x + [norm](mixer(norm(x))), then x + [norm](feed_forward(norm(x))); the inner norms are Gemma's.

    The two sub-layers are separate methods because tokens are dropped between them.
    """

    def __init__(
        self,
        input_norm: RMSNorm,
        mixer: Attention | GatedDeltaNet,
        feed_forward_norm: RMSNorm,
        feed_forward: FeedForward | MixtureOfExperts,
        mixer_output_norm: RMSNorm | None = None,
        feed_forward_output_norm: RMSNorm | None = None,
    ):
        self.input_norm = input_norm
        self.mixer = mixer
        self.mixer_output_norm = mixer_output_norm
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.feed_forward_output_norm = feed_forward_output_norm

    def mix(
        self, x: Float[Array, "T D"], rows: PackedRows
    ) -> tuple[Float[Array, "T D"], AttentionCache | RecurrentCache, Attended | None]:
        """The mixer sub-layer of packed rows: new hidden states, the layer's cache, and what its attention shows."""
        return self.mixer(x, rows, self.input_norm, self._add_mixed)

    def mix_last(
        self, x: Float[Array, "T D"], rows: PackedRows
    ) -> tuple[Float[Array, "B D"], AttentionCache | RecurrentCache]:
        """The mixer sub-layer for every request's last row alone, which is all that a model's last layer is for."""
        return self.mixer.last(x, rows, self.input_norm, self._add_mixed)

    def window_queries(self, x: Float[Array, "T D"], rows: PackedRows, count: int) -> Float[Array, "B n H d"]:
        """Queries of each request's last `count` rows, of a layer whose mixer is attention."""
        assert isinstance(self.mixer, Attention)
        return self.mixer.window_queries(x, rows, self.input_norm, count)

    def mix_step(
        self, x: Float[Array, "B D"], view: AttentionStep | RecurrentCache
    ) -> tuple[Float[Array, "B D"], AttentionCache | RecurrentCache]:
        """The mixer sub-layer of one decode step: new hidden states and what the layer keeps."""
        count = jnp.asarray(x.shape[0], jnp.int32)
        output, kept = self.mixer.step(self.input_norm(x, count), view, count)  # pyright: ignore[reportArgumentType]
        return self._add_mixed(x, output, count), kept

    def mix_with[Kept](
        self,
        x: Float[Array, "T D"],
        mix: Callable[[Array], tuple[Float[Array, "T D"], Kept]],
        count: Int32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "T D"], Kept]:
        """The mixer sub-layer with `mix(normed rows)` -> (output, whatever it keeps) in place of the mixer's call;
        `count` as in `projection.project`."""
        output, kept = mix(self.input_norm(x, count))
        return self._add_mixed(x, output, count), kept

    def transform(self, x: Float[Array, "T D"], count: Int32[Array, ""] | None = None) -> Float[Array, "T D"]:
        """The feed-forward sub-layer: every row on its own; `count` as in `projection.project`."""
        with jax.named_scope("feed_forward_sublayer"):
            output = self.feed_forward(self.feed_forward_norm(x, count), count)
            return add_residual(x, output, self.feed_forward_output_norm, count)

    def transform_with[Kept](
        self, x: Float[Array, "T D"], transform: Callable[[Array], tuple[Float[Array, "T D"], Kept]]
    ) -> tuple[Float[Array, "T D"], Kept]:
        """The feed-forward sub-layer with `transform(normed rows)` -> (output, whatever it keeps) in its place."""
        output, kept = transform(self.feed_forward_norm(x))
        return add_residual(x, output, self.feed_forward_output_norm, None), kept

    def _add_mixed(
        self, x: Float[Array, "T D"], output: Float[Array, "T D"], count: Int32[Array, ""] | None = None
    ) -> Float[Array, "T D"]:
        return add_residual(x, output, self.mixer_output_norm, count)
