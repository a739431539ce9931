"""Workload shapes of causal attention, shared by tests and benchmarks."""

import math
from typing import NamedTuple

from pallas_kernels.block_score.shapes import GEMMA_3_12B, LLAMA_3_1_8B, QWEN3_NEXT_80B, SMOLLM2_135M, Heads

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


class Shape(NamedTuple):
    """One call: `batch` requests packed along `rows` rows; `window` None is full causal attention."""

    heads: Heads
    rows: int
    batch: int = 1
    window: int | None = None


SHAPES = (
    *(Shape(LLAMA_3_1_8B, rows) for rows in (4096, 16384, 65536)),
    *(Shape(QWEN3_NEXT_80B, rows) for rows in (4096, 16384, 65536)),
    *(Shape(GEMMA_3_12B, rows) for rows in (4096, 16384, 65536)),
    *(Shape(GEMMA_3_12B, rows, window=1024) for rows in (4096, 16384, 65536)),
    Shape(LLAMA_3_1_8B, 65536, batch=8),
    Shape(GEMMA_3_12B, 65536, batch=8, window=1024),
    Shape(SMOLLM2_135M, 8192),
)
# One that stands for all: the rest differ in sizes only, and what the ranges are is known at run time.
DISTINCT_SHAPES = (Shape(LLAMA_3_1_8B, 1000),)
