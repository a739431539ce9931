"""Attention of each request's last queries over its whole prompt: what most methods choose by."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

Reduce = Callable[[Float[Array, "G n T"], Int32[Array, ""]], Any]


def map_window(
    reduce: Reduce,
    queries: Float[Array, "B n H d"],
    keys: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, " B+1"],
    scale: float,
) -> Any:
    """`reduce(probabilities, request)` of every request and KV head, stacked: leaves [B, KV, ...].

    Probabilities are float32, of the query heads that share the KV head; their last axis counts the request's rows from
    its own start, and is 0 past its end. A row of queries that a short request does not have is 0 throughout. One
    request and KV head is in memory at a time.
    """
    _, window, num_heads, head_dim = queries.shape
    num_rows, num_kv_heads, _ = keys.shape
    grouped = queries.reshape(-1, window, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    by_head = keys.swapaxes(0, 1)
    columns = jnp.arange(num_rows, dtype=jnp.int32)

    def of_request(request: Int32[Array, ""], own: Float[Array, "KV G n d"]) -> Any:
        start = cu_seqlens[request]
        within = cu_seqlens[request + 1] - start - window + jnp.arange(window, dtype=jnp.int32)
        visible = columns[None, :] <= within[:, None]

        def of_head(query: Float[Array, "G n d"], key: Float[Array, "T d"]) -> Any:
            moved = jnp.roll(key, -start, axis=0)
            scores = jnp.einsum("gnd,td->gnt", query, moved, preferred_element_type=jnp.float32) * scale
            # A row that sees nothing has a maximum of -inf; softmax must not meet it.
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
            return reduce(jnp.where(visible, weights, 0.0), request)

        return jax.lax.map(lambda pair: of_head(*pair), (own, by_head))

    requests = jnp.arange(grouped.shape[0], dtype=jnp.int32)
    return jax.lax.map(lambda pair: of_request(*pair), (requests, grouped))


def sum_diagonals(probabilities: Float[Array, "G n T"], length: Int32[Array, ""]) -> Float[Array, "G T"]:
    """Sums over the last n rows of a request by distance: [.., o] is that of the keys o rows before their query.

    Row w of the n is row length - n + w of the request. 0 for distances that no row has.
    """
    group, window, num_rows = probabilities.shape
    # Row w moved right by n - 1 - w: keys of one distance then lie in one column, distance o in column length - 1 - o.
    # Written as one row after the other, a row shorter by one column moves each one place further.
    padded = jnp.pad(probabilities[:, ::-1], ((0, 0), (0, 0), (0, window))).reshape(group, -1)
    width = num_rows + window - 1
    columns = padded[:, : window * width].reshape(group, window, width).sum(axis=1)
    at = length - 1 - jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.where(at >= 0, columns[:, jnp.maximum(at, 0)], 0.0)
