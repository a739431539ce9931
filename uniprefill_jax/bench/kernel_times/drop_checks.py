"""Checks of the kernels of a drop, before anything is measured, on whatever device there is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_score import block_score, shapes
from pallas_kernels.block_score import choose_backend as score_backend
from pallas_kernels.compact_rows import choose_backend as compact_backend
from pallas_kernels.compact_rows import compact_rows
from pallas_kernels.platform import Backend
from pallas_kernels.top_p_select import choose_backend as select_backend
from pallas_kernels.top_p_select import top_p_select
from uniprefill_jax.errors import UniPrefillError

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-3}


def exact_mass(queries: np.ndarray, keys: np.ndarray, block_size: int, scale: float) -> np.ndarray:
    """Normalised block mass of one request in float64."""
    window, heads, _ = queries.shape
    length, kv_heads, _ = keys.shape
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    mass = np.zeros(length)
    visible = np.arange(length)[None, :] <= (length - window + np.arange(window))[:, None]
    for head in range(heads):
        scores = np.where(visible, queries[:, head] @ keys[:, head * kv_heads // heads].T * scale, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        mass += (weights / weights.sum(1, keepdims=True)).sum(0)
    return np.add.reduceat(mass, np.arange(0, length, block_size)) / (heads * window)


def accuracy(seed: int) -> list[dict[str, Any]]:
    """Largest relative error of the block mass against float64 on the same inputs, by family, dtype and backend."""
    length, rows = 4096, []
    for heads in shapes.FAMILIES:
        for dtype in ("float32", "bfloat16"):
            keys_of = jax.random.split(jax.random.key(seed), 2)
            queries = jax.random.normal(keys_of[0], (1, 128, heads.heads, heads.head_dim)).astype(dtype)
            keys = (2 * jax.random.normal(keys_of[1], (length, heads.kv_heads, heads.head_dim))).astype(dtype)
            scale = heads.head_dim**-0.5
            exact = exact_mass(np.asarray(queries[0], np.float32), np.asarray(keys, np.float32), 64, scale)
            chosen: set[Backend] = {"reference", score_backend(**heads._asdict(), dtype=dtype)}
            for backend in sorted(chosen):
                mass = np.asarray(_mass(queries, keys, scale, backend), np.float64)
                error = float(np.abs(mass / exact - 1).max())
                if not error <= TOLERANCES[dtype]:
                    raise UniPrefillError(f"block_score {backend} {dtype} {heads}: relative error {error:.2e}")
                labels = {"op": "block_score, error", **heads._asdict(), "dtype": dtype, "backend": backend}
                rows.append(labels | {"relative_error": error})
    return rows


def _mass(queries: jax.Array, keys: jax.Array, scale: float, backend: Backend) -> jax.Array:
    length = keys.shape[0]

    def run(queries, keys):
        cu = jnp.array([0, length], jnp.int32)
        return block_score(
            queries, keys, cu, num_blocks=length // 64, block_size=64, scale=scale, backend=backend
        ).mass[0]

    return jax.jit(run)(queries, keys)


def kept_sets(seed: int, batches: int) -> dict[str, Any]:
    """Random ragged batches: the kernel keeps what the reference keeps wherever the margin is above 1e-6."""
    kernel = select_backend()
    batch, num_blocks, block_size = 8, 128, 64
    num_rows = batch * num_blocks * block_size
    random = np.random.default_rng(seed)

    def run(backend, scores, cu, top_p, cut, over):
        return top_p_select(
            scores,
            cu,
            top_p,
            num_rows=num_rows,
            block_size=block_size,
            sink_tokens=128,
            window_tokens=128,
            cut=cut,
            over=over,
            backend=backend,
        )

    def compare(scores, cu, top_p, cut, over):
        expected = run("reference", scores, cu, top_p, cut, over)
        found = run(kernel, scores, cu, top_p, cut, over)
        later = jax.lax.optimization_barrier((scores, cu, top_p))  # or the compiler would merge the two runs
        again = run(kernel, later[0], later[1], later[2], cut, over)
        clear = expected.cut_margin > 1e-6
        same = (expected.kept_blocks == found.kept_blocks).all(1)
        whole = (expected.indices == found.indices).all() & (expected.cu_seqlens == found.cu_seqlens).all()
        identical = jnp.stack([(a == b).all() for a, b in zip(found, again, strict=True)]).all()
        return (clear & ~same).sum(), clear.all() & ~whole, ~identical, clear.sum()

    programs = {
        (cut, over): jax.jit(lambda s, cu, p, cut=cut, over=over: compare(s, cu, p, cut, over))
        for cut in ("crossing", "below")
        for over in ("all", "candidates")
    }
    totals = np.zeros(4, np.int64)
    for index in range(batches):
        lengths = random.integers(0, num_blocks * block_size + 1, batch)
        scores = random.random((batch, num_blocks)).astype(np.float32) ** random.integers(1, 12)
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        top_p = random.uniform(0.05, 0.999, batch).astype(np.float32)
        program = list(programs.values())[index % 4]
        totals += np.asarray(jax.device_get(program(scores, cu, top_p)), np.int64)
    differing, wrong_indices, not_identical, clear = (int(value) for value in totals)
    if differing or wrong_indices or not_identical:
        raise UniPrefillError(
            f"top_p_select {kernel}: {differing} kept sets and {wrong_indices} index lists differ from the reference, "
            f"{not_identical} repeats differ"
        )
    return {
        "op": "top_p_select, kept sets",
        "backend": kernel,
        "batches": batches,
        "requests_away_from_ties": clear,
        "differing": differing,
    }


def repeats(seed: int) -> dict[str, Any]:
    """Whether two runs on the same input give the same bits, by operation."""
    first, second, third = jax.random.split(jax.random.key(seed), 3)
    queries = jax.random.normal(first, (2, 128, 32, 128), jnp.bfloat16)
    keys = jax.random.normal(second, (8192, 8, 128), jnp.bfloat16)
    hidden = jax.random.normal(third, (8192, 4096), jnp.bfloat16)
    cu = jnp.array([0, 3001, 8192], jnp.int32)
    score = jax.jit(
        lambda q, k: block_score(
            q, k, cu, num_blocks=128, block_size=64, scale=0.088, peak=True, backend=score_backend()
        )
    )
    indices = jnp.arange(8192, dtype=jnp.int32)
    move = jax.jit(lambda x: compact_rows((x,), indices, jnp.int32(5000), out_rows=8192, backend=compact_backend()))

    def same(run, *arguments):
        once, again = (jax.device_get(run(*arguments)) for _ in range(2))
        return all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))

    return {"op": "same bits twice", "block_score": same(score, queries, keys), "compact_rows": same(move, hidden)}
