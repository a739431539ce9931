"""How the rows of a chunk belong to requests."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

ALIGNMENT = 128  # rows of which every request's first place in a chunk is a multiple: no tile of queries mixes requests


class ChunkRows(NamedTuple):
    """One entry for every request in a chunk.

    Attributes:
        places: where its rows begin in the chunk: rising, multiples of ALIGNMENT, the first of them 0.
        counts: how many rows of it are there; what follows up to the next place is padding.
        first_rows: number of its first row there among all its rows.
    """

    places: Int32[Array, " R"]
    counts: Int32[Array, " R"]
    first_rows: Int32[Array, " R"]

    def of_places(self, places: Int32[Array, " n"]) -> tuple[Int32[Array, " n"], ...]:
        """For places in the chunk: the request, the number of its row there, and its number of rows up to its last."""
        request = jnp.searchsorted(self.places, places, side="right").astype(jnp.int32) - 1
        row = self.first_rows[request] + places - self.places[request]
        return request, row, self.first_rows[request] + self.counts[request]
