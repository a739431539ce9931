"""Top-p selection of blocks: the entry point that picks a backend."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.platform import Backend, Kernels, kernels_of
from pallas_kernels.top_p_select import gpu, tpu
from pallas_kernels.top_p_select.reference import cut_blocks, select


class Selection(NamedTuple):
    """What one selection keeps.

    indices: packed row numbers of the kept rows, in order, one request after another; the tail holds `num_rows`.
    cu_seqlens: cumulative lengths of the kept rows, starting at 0.
    kept_blocks: blocks that the cut chose or whose rows are all forced.
    normalised: scores divided by their sum over the request's blocks.
    cut_margin: distance of the nearest deciding cumulative mass to `top_p`; inf where no block took part.
    """

    indices: Int32[Array, " num_rows"]
    cu_seqlens: Int32[Array, "B+1"]
    kept_blocks: Bool[Array, "B num_blocks"]
    normalised: Float[Array, "B num_blocks"]
    cut_margin: Float[Array, " B"]


_BACKENDS = {"reference": cut_blocks, "mosaic_gpu": gpu.cut_blocks_mosaic_gpu, "mosaic_tpu": tpu.cut_blocks_mosaic_tpu}


def choose_backend(*, num_blocks: int = 2048, platform: str | None = None) -> Kernels:
    """Name the backend that `backend="auto"` takes on `platform` (default: what jax runs on)."""
    backend = kernels_of(platform)
    if backend == "reference":
        return backend
    unsupported = gpu.unsupported if backend == "mosaic_gpu" else tpu.unsupported
    return backend if unsupported(num_blocks) is None else "reference"


def top_p_select(
    scores: Float[Array, "B num_blocks"],
    cu_seqlens: Int32[Array, "B+1"],
    top_p: Float[Array, ""] | Float[Array, " B"] | float,
    *,
    num_rows: int,
    block_size: int,
    sink_tokens: int,
    window_tokens: int,
    cut: Literal["crossing", "below"] = "crossing",
    over: Literal["all", "candidates"] = "all",
    backend: Backend = "auto",
) -> Selection:
    """Keep the fewest blocks that carry `top_p` of each request's score, and the sink and window rows.

    Blocks are ordered by normalised score, descending, ties to the higher index. ``cut="crossing"`` keeps a block iff
    the mass strictly before it is <= top_p (paper, equation 5); ``cut="below"`` iff the mass up to and including it is
    (the authors' torch reference), the top block always. All sums are float32. ``top_p >= 1`` keeps everything.

    The backends differ in how they find the cut: the reference sorts, the kernels bisect. Normalising, forcing and the
    emission of indices are plain XLA in all of them.

    Args:
        scores: non-negative block scores; entries beyond a request's last block are ignored, whatever they hold.
        cu_seqlens: request r owns packed rows ``[cu_seqlens[r], cu_seqlens[r+1])``; traced.
        top_p: one value, or one per request, at least 0; traced.
        num_rows: rows of the packed arrays, the length of `indices`.
        block_size: tokens per block, counted from each request's first row.
        sink_tokens: first rows of each request that always stay, row by row.
        window_tokens: last rows of each request that always stay, row by row.
        over: "candidates" leaves blocks whose rows are all forced out of the sum, the order and the cut.
        backend: "auto" is `choose_backend`; a backend that is named is used or refused, never replaced.

    Raises:
        ValueError: shapes that do not fit together, or an unknown `cut`, `over` or `backend`.
    """
    scores, cu_seqlens = jnp.asarray(scores), jnp.asarray(cu_seqlens)
    if scores.ndim != 2 or cu_seqlens.shape != (scores.shape[0] + 1,):
        raise ValueError(
            f"top_p_select: needs scores [B, num_blocks] and cu_seqlens [B+1]; "
            f"got {scores.shape} and {cu_seqlens.shape}"
        )
    if cut not in ("crossing", "below"):
        raise ValueError(f"top_p_select: cut is {cut!r}; use 'crossing' or 'below'")
    if over not in ("all", "candidates"):
        raise ValueError(f"top_p_select: over is {over!r}; use 'all' or 'candidates'")
    if min(num_rows, block_size, scores.shape[1]) < 1 or min(sink_tokens, window_tokens) < 0:
        raise ValueError(
            f"top_p_select: num_rows {num_rows}, block_size {block_size} and num_blocks {scores.shape[1]} must be at "
            f"least 1, sink_tokens {sink_tokens} and window_tokens {window_tokens} at least 0"
        )
    limit = jnp.asarray(top_p, jnp.float32)
    if limit.shape not in ((), (scores.shape[0],)):
        raise ValueError(f"top_p_select: top_p has shape {limit.shape}; it needs () or ({scores.shape[0]},)")
    limit = jnp.broadcast_to(limit, (scores.shape[0],))
    chosen = choose_backend(num_blocks=scores.shape[1]) if backend == "auto" else backend
    if chosen not in _BACKENDS:
        raise ValueError(f"top_p_select: backend is {backend!r}; use 'auto', {', '.join(map(repr, _BACKENDS))}")
    return Selection(
        *select(
            _BACKENDS[chosen],
            scores,
            cu_seqlens,
            limit,
            num_rows=num_rows,
            block_size=block_size,
            sink_tokens=sink_tokens,
            window_tokens=window_tokens,
            cut=cut,
            over=over,
        )
    )
