"""Workload shapes of block scoring, shared by tests and benchmarks."""

from typing import NamedTuple


class Heads(NamedTuple):
    """Attention heads of a model family."""

    heads: int
    kv_heads: int
    head_dim: int


LLAMA_3_1_8B = Heads(32, 8, 128)
GEMMA_3_12B = Heads(16, 8, 256)
QWEN3_NEXT_80B = Heads(16, 2, 256)
SMOLLM2_135M = Heads(9, 3, 64)
FAMILIES = (LLAMA_3_1_8B, GEMMA_3_12B, QWEN3_NEXT_80B)


class Shape(NamedTuple):
    """One call: `batch` requests of up to `length` tokens each."""

    heads: Heads
    batch: int
    length: int
    window: int = 128
    block_size: int = 64

    @property
    def rows(self) -> int:
        """Rows of the packed arrays."""
        return self.batch * self.length

    @property
    def num_blocks(self) -> int:
        """Blocks per request."""
        return -(-self.length // self.block_size)


LENGTHS = (1024, 4096, 16384, 65536, 131072, 1048576)
BATCHED_LENGTHS = (1024, 4096, 16384, 65536)  # of each of 16 requests: one million tokens at most
SHAPES = tuple(
    [Shape(heads, 1, length) for heads in FAMILIES for length in LENGTHS]
    + [Shape(heads, 16, length) for heads in FAMILIES for length in BATCHED_LENGTHS]
)
# One of each kind of program that the kernels come in; the rest differ in sizes only.
DISTINCT_SHAPES = (
    Shape(LLAMA_3_1_8B, 1, 4096),
    Shape(QWEN3_NEXT_80B, 1, 4096, block_size=128),
    Shape(SMOLLM2_135M, 2, 1024, window=32, block_size=32),
)
