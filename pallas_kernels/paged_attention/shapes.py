"""Workload shapes of decode attention over pages, shared by tests and benchmarks."""

from typing import NamedTuple

from pallas_kernels.block_score.shapes import GEMMA_3_12B, LLAMA_3_1_8B, QWEN3_NEXT_80B, SMOLLM2_135M, Heads


class Shape(NamedTuple):
    """One decode step of one layer: `batch` requests of up to `length` rows in pages of `page` rows."""

    heads: Heads
    batch: int
    length: int
    page: int = 64
    window: int | None = None

    @property
    def max_pages(self) -> int:
        """Pages of one request."""
        return -(-self.length // self.page)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.batch * self.max_pages


FAMILIES = (LLAMA_3_1_8B, GEMMA_3_12B, QWEN3_NEXT_80B)
SHAPES = tuple(
    [Shape(heads, batch, length) for heads in FAMILIES for batch, length in ((1, 131072), (16, 32768), (64, 4096))]
    + [Shape(heads, 16, 4096, page) for heads in (*FAMILIES, SMOLLM2_135M) for page in (8, 16, 32, 128, 256)]
)
# One of each kind of program that the kernels come in; the rest differ in sizes only.
DISTINCT_SHAPES = (
    Shape(LLAMA_3_1_8B, 16, 4096),
    Shape(QWEN3_NEXT_80B, 4, 4096, page=128),
    Shape(SMOLLM2_135M, 4, 1024, page=16),
)
