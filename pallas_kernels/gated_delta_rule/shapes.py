"""Workload shapes of the gated delta rule, shared by tests and benchmarks."""

from typing import NamedTuple


class Heads(NamedTuple):
    """Heads of a model family's linear-attention layers."""

    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int


QWEN3_NEXT_80B = Heads(32, 16, 128, 128)


class Shape(NamedTuple):
    """One call: `batch` requests of `rows` packed rows together."""

    heads: Heads
    batch: int
    rows: int


SHAPES = (
    *(Shape(QWEN3_NEXT_80B, 1, rows) for rows in (1024, 8192, 65536, 131072)),
    *(Shape(QWEN3_NEXT_80B, 8, rows) for rows in (8192, 65536)),
)
# One of each kind of program that the kernels come in; the rest differ in sizes only.
DISTINCT_SHAPES = (Shape(QWEN3_NEXT_80B, 1, 1024), Shape(QWEN3_NEXT_80B, 8, 8192))
