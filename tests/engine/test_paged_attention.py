"""Attention of single queries over pages against a plain softmax; whatever nobody sees holds NaN."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention

PAGE, PAGES, WIDTH, KV_HEADS, HEADS, SIZE = 16, 90, 24, 2, 6, 8


def pool(lengths: list[int], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, values and page tables; rows past a request's end, free pages and absent ids are poison."""
    keys, values = (np.full((PAGES, KV_HEADS, PAGE, SIZE), np.nan, np.float32) for _ in range(2))
    table = np.full((len(lengths), WIDTH), PAGES, np.int32)
    free = random.permutation(PAGES)
    for request, length in enumerate(lengths):
        for column in range(-(-length // PAGE)):
            page, free = free[0], free[1:]
            rows = min(PAGE, length - column * PAGE)
            table[request, column] = page
            for pages in (keys, values):
                pages[page, :, :rows] = random.standard_normal((KV_HEADS, rows, SIZE))
    return keys, values, table


def plain(query, keys, values, table, first, last, scale):
    """One query row in float64."""
    rows = np.arange(first, last + 1)
    key, value = (pages[table[rows // PAGE], :, rows % PAGE].astype(np.float64) for pages in (keys, values))
    output = np.zeros_like(query, np.float64)
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        weights = np.exp(scale * key[:, own] @ query[head].astype(np.float64))
        output[head] = weights / weights.sum() @ value[:, own]
    return output


@pytest.mark.parametrize("lengths", [[1, 17, 300, 0], [384, 16, 0, 257]])
def test_single_queries(lengths):
    random = np.random.default_rng(len(lengths) + lengths[0])
    keys, values, table = pool(lengths, random)
    queries = random.standard_normal((4, HEADS, SIZE), dtype=np.float32)
    first = [max(length - window, 0) for length, window in zip(lengths, (400, 5, 260, 3), strict=True)]
    output = paged_attention(
        *map(jnp.asarray, (queries, keys, values, table)), jnp.asarray(lengths), jnp.asarray(first), scale=0.3
    )
    for request, length in enumerate(lengths):
        wanted = np.zeros((HEADS, SIZE))
        if length:
            wanted = plain(queries[request], keys, values, table[request], first[request], length - 1, 0.3)
        np.testing.assert_allclose(output[request], wanted, atol=2e-6)


def test_shapes_that_do_not_fit():
    pages = jnp.zeros((4, 2, PAGE, 8))
    fits = (jnp.zeros((2, 4, 8)), pages, pages, jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32), jnp.zeros(2, int))
    wrong = {0: jnp.zeros((2, 3, 8)), 2: pages[:2], 3: jnp.zeros((1, 3), jnp.int32), 4: jnp.ones(3, jnp.int32)}
    for place, array in wrong.items():
        arguments = [array if number == place else right for number, right in enumerate(fits)]
        with pytest.raises(ValueError, match="paged_attention"):
            paged_attention(*arguments, scale=1.0)
    with pytest.raises(ValueError, match="mosaic_gpu"):
        paged_attention(*fits, scale=1.0, backend="mosaic_gpu")
