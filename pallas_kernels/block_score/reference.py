"""Block scores in plain jnp: the definition of the operation, and the path on platforms without a kernel."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

# Stands for "masked" in scores. Finite, so that a row whose every key is masked yields no NaN from inf - inf.
MASKED = -1e30


def block_score_reference(
    queries: Float[Array, "B n H d"],
    keys: Float[Array, "T KV d"],
    cu_seqlens: Int32[Array, "B+1"],
    *,
    num_blocks: int,
    block_size: int,
    scale: float,
    row_log_sum_exp: Float[Array, "B n H"] | None = None,
) -> tuple[Float[Array, "B num_blocks"], Float[Array, "B num_blocks"]]:
    """Undivided mass and peak of every block of every request, both float32.

    Walks the keys of one request after another in chunks (a dynamic number of them, so the work follows the real
    lengths and not the padded ones), twice: first for each row's log-sum-exp, then for the softmax mass of each block.
    With `row_log_sum_exp` given the first walk is left out. Nothing larger than (H, n, chunk) is alive at a time.
    """
    batch, window, heads, head_dim = queries.shape
    rows, kv_heads, _ = keys.shape
    group = heads // kv_heads
    chunk = _chunk_rows(rows, block_size, window * heads)
    chunk_blocks = chunk // block_size
    covered = max(num_blocks, -(-rows // block_size))
    buffer_blocks = -(-covered // chunk_blocks) * chunk_blocks
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT
    slice_rows = min(chunk, rows)

    def score_request(_, operands):
        query, start, length, given = operands
        query_position = length - window + jnp.arange(window, dtype=jnp.int32)
        valid_row = query_position >= 0
        # Rows outside the request may hold NaN, and NaN * 0 is NaN: the values go, not only their scores.
        query = jnp.where(valid_row[:, None, None], query, 0).reshape(window, kv_heads, group, head_dim)
        chunks = (length + chunk - 1) // chunk

        def masked_scores(index):
            first = start + index * chunk
            # The last chunk may reach past the end of the array: slice what exists and shift it into place.
            clamped = jnp.clip(first, 0, rows - slice_rows)
            piece = lax.dynamic_slice_in_dim(keys, clamped, slice_rows)
            if slice_rows < chunk:
                piece = jnp.pad(piece, ((0, chunk - slice_rows), (0, 0), (0, 0)))
            piece = jnp.roll(piece, clamped - first, axis=0)
            position = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
            piece = jnp.where((position < length)[:, None, None], piece, 0)
            scores = jnp.einsum("nkgd,ckd->kgnc", query, piece, precision=precision, preferred_element_type=jnp.float32)
            visible = position[None, :] <= query_position[:, None]
            return jnp.where(visible, scores * scale, MASKED), visible

        def accumulate(index, carry):
            maximum, total = carry
            scores, visible = masked_scores(index)
            higher = jnp.maximum(maximum, scores.max(-1))
            weights = jnp.where(visible, jnp.exp(scores - higher[..., None]), 0.0)
            return higher, total * jnp.exp(maximum - higher) + weights.sum(-1)

        if row_log_sum_exp is None:
            empty = (kv_heads, group, window)
            maximum, total = lax.fori_loop(
                0, chunks, accumulate, (jnp.full(empty, MASKED, jnp.float32), jnp.zeros(empty, jnp.float32))
            )
            log_sum_exp = maximum + jnp.log(jnp.where(total > 0, total, 1.0))
        else:
            log_sum_exp = given.astype(jnp.float32).T.reshape(kv_heads, group, window)

        def collect(index, carry):
            mass, peak = carry
            scores, visible = masked_scores(index)
            used = visible & valid_row[:, None]
            probability = jnp.where(used, jnp.exp(scores - log_sum_exp[..., None]), 0.0)
            blocks = probability.reshape(kv_heads, group, window, chunk_blocks, block_size).sum(-1)
            at = index * chunk_blocks
            mass = lax.dynamic_update_slice_in_dim(mass, blocks.sum((0, 1, 2)), at, 0)
            peak = lax.dynamic_update_slice_in_dim(peak, blocks.max((0, 1, 2)), at, 0)
            return mass, peak

        nothing = jnp.zeros(buffer_blocks, jnp.float32)
        mass, peak = lax.fori_loop(0, chunks, collect, (nothing, nothing))
        return None, (mass[:num_blocks], peak[:num_blocks])

    lengths = jnp.diff(cu_seqlens)
    given = jnp.zeros((batch, 0, 0), jnp.float32) if row_log_sum_exp is None else row_log_sum_exp
    _, (mass, peak) = lax.scan(score_request, None, (queries, cu_seqlens[:-1], lengths, given))
    return mass, peak


def _chunk_rows(rows: int, block_size: int, query_rows: int) -> int:
    """Keys per step: about 64 MB of float32 scores on an accelerator, 8 MB on a CPU (cache), whole blocks."""
    elements = (2 << 20) if jax.default_backend() == "cpu" else (16 << 20)
    wanted = max(elements // query_rows, block_size)
    needed = -(-rows // block_size) * block_size
    return max(min(wanted // block_size * block_size, needed), block_size)
