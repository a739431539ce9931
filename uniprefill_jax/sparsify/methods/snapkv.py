"""SnapKV (arXiv 2404.14469): the prompt's last queries vote on which cached rows decoding sees, by head.

Softmax of the last `window` queries over the prompt, summed over them; of the rows before the window the sums are
averaged over `kernel` neighbours, so that what surrounds a hit stays with it; the best rows and the window itself make
up `capacity`. Defaults are those of the authors' patches of models: window 32, capacity 2048, average over 5.

Where this reading is ours: the authors repeat keys and values for every query head before they choose, which gives up
what grouped heads save; here the query heads that share a KV head vote together, by the sum, and it keeps one choice.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from uniprefill_jax.errors import ConfigError
from uniprefill_jax.models.batch import request_of_row
from uniprefill_jax.sparsify.methods.checks import check_integer
from uniprefill_jax.sparsify.methods.protocol import CacheCompression
from uniprefill_jax.sparsify.methods.window_scores import map_window


@dataclass(frozen=True)
class SnapKV(CacheCompression):
    """Attributes:
    capacity: most rows of a request that stay, window included; more than `window`.
    window: last queries, which vote and whose rows stay.
    kernel: neighbouring rows over which votes are averaged, odd.
    """

    name: ClassVar[str] = "snapkv"
    capacity: int = 2048
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        check_integer(self, "window", 1)
        check_integer(self, "capacity", self.window + 1)
        check_integer(self, "kernel", 1)
        if self.kernel % 2 == 0:
            raise ConfigError(f"snapkv: kernel is {self.kernel}; use an odd number, so that votes stay in place")

    @property
    def most_rows(self) -> int:
        """The capacity."""
        return self.capacity

    @property
    def observed(self) -> int:
        """The window."""
        return self.window

    def score(
        self,
        queries: Float[Array, "B n H d"],
        keys: Float[Array, "T KV d"],
        cu_seqlens: Int32[Array, " B+1"],
        scale: float,
    ) -> Float[Array, "T KV"]:
        """Averaged votes; the window's rows are best."""
        num_rows = keys.shape[0]
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]

        def votes(probabilities: Float[Array, "G n T"], request: Int32[Array, ""]) -> Float[Array, " T"]:
            places = jnp.arange(num_rows, dtype=jnp.int32)
            before_window = places < lengths[request] - self.window
            own = jnp.where(before_window, probabilities.sum(axis=(0, 1)), 0.0)
            half = self.kernel // 2
            averaged = jax.lax.reduce_window(own, 0.0, jax.lax.add, (self.kernel,), (1,), [(half, half)]) / self.kernel
            return jnp.where(before_window, averaged, jnp.inf)

        by_request = map_window(votes, queries, keys, cu_seqlens, scale)
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        request = jnp.minimum(request_of_row(cu_seqlens, rows), lengths.shape[0] - 1)
        return by_request[request, :, rows - cu_seqlens[request]]
