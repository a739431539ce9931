"""Workload shapes of block-sparse attention, shared by tests and benchmarks."""

from typing import NamedTuple

from pallas_kernels.block_score.shapes import GEMMA_3_12B, LLAMA_3_1_8B, QWEN3_NEXT_80B, SMOLLM2_135M, Heads


class Shape(NamedTuple):
    """One call: `batch` requests packed along `rows` rows, of whose earlier blocks a share is kept."""

    heads: Heads
    rows: int
    block_size: int
    density: float
    columns: int = 0
    batch: int = 1


SHAPES = (
    *(
        Shape(LLAMA_3_1_8B, rows, block_size, density)
        for rows in (32768, 131072)
        for block_size in (128, 64)
        for density in (0.5, 0.1)
    ),
    Shape(LLAMA_3_1_8B, 131072, 64, 0.1, columns=512),
    Shape(QWEN3_NEXT_80B, 32768, 128, 0.1),
    Shape(GEMMA_3_12B, 32768, 64, 0.1),
    Shape(SMOLLM2_135M, 32768, 128, 0.1),
    Shape(LLAMA_3_1_8B, 65536, 128, 0.1, batch=8),
)
# One of each kind of program that the kernel comes in; the rest differ in sizes only.
DISTINCT_SHAPES = (
    Shape(LLAMA_3_1_8B, 1000, 128, 0.5, batch=2),
    Shape(LLAMA_3_1_8B, 1000, 64, 0.5, columns=100),
    Shape(QWEN3_NEXT_80B, 1000, 128, 0.5, columns=100),
    Shape(GEMMA_3_12B, 1000, 64, 0.5),
    Shape(SMOLLM2_135M, 1000, 64, 0.5, columns=100, batch=2),
    Shape(SMOLLM2_135M, 1000, 128, 0.5),
)
