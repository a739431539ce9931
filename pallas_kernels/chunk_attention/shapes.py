"""Workload shapes of chunk attention, shared by tests and benchmarks."""

from typing import NamedTuple

from pallas_kernels.block_score.shapes import GEMMA_3_12B, LLAMA_3_1_8B, QWEN3_NEXT_80B, SMOLLM2_135M, Heads


class Shape(NamedTuple):
    """One layer of one chunk: the last `rows` of `length` rows of each of `batch` requests, in pages of `page` rows."""

    heads: Heads
    rows: int
    length: int
    batch: int = 1
    window: int | None = None
    page: int = 64

    @property
    def max_pages(self) -> int:
        """Pages of one request."""
        return -(-self.length // self.page)


SHAPES = (
    *(Shape(heads, 2048, length) for heads in (LLAMA_3_1_8B, GEMMA_3_12B, QWEN3_NEXT_80B) for length in (4096, 32768)),
    Shape(LLAMA_3_1_8B, 2048, 131072),
    Shape(LLAMA_3_1_8B, 512, 32768),
    Shape(LLAMA_3_1_8B, 512, 131072),
    Shape(LLAMA_3_1_8B, 512, 512, batch=16),
    Shape(GEMMA_3_12B, 2048, 32768, window=1024),
    Shape(SMOLLM2_135M, 2048, 8192),
    *(Shape(LLAMA_3_1_8B, 2048, 32768, page=page) for page in (16, 128, 256)),
)
# One of each kind of program that the kernels come in; the rest differ in sizes only.
DISTINCT_SHAPES = (
    Shape(LLAMA_3_1_8B, 512, 4096),
    Shape(QWEN3_NEXT_80B, 256, 1024, batch=2, page=128),
    Shape(SMOLLM2_135M, 256, 1024, page=16),
)
