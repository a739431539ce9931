"""Workload shapes of grouped matrix products, shared by tests and benchmarks."""

from typing import Literal, NamedTuple

Routing = Literal["uniform", "zipf", "single"]


class Shape(NamedTuple):
    """One call: `rows` of `inner` columns among `groups`, out of `stacked` matrices of `inner` x `columns`."""

    rows: int
    inner: int
    columns: int
    groups: int
    stacked: int
    gated: bool = False


QWEN3_NEXT_HIDDEN, QWEN3_NEXT_EXPERT, QWEN3_NEXT_EXPERTS, QWEN3_NEXT_CHOSEN = 2048, 512, 512, 10


def mixture_shapes(tokens: int) -> tuple[Shape, ...]:
    """The products of one Qwen3-Next mixture layer: gate and up together, one of them alone, down."""
    rows, experts = tokens * QWEN3_NEXT_CHOSEN, QWEN3_NEXT_EXPERTS
    return (
        Shape(rows, QWEN3_NEXT_HIDDEN, QWEN3_NEXT_EXPERT, experts, experts, gated=True),
        Shape(rows, QWEN3_NEXT_HIDDEN, QWEN3_NEXT_EXPERT, experts, experts),
        Shape(rows, QWEN3_NEXT_EXPERT, QWEN3_NEXT_HIDDEN, experts, experts),
    )


# Plain products with one matrix of a stack: Llama-3.1-8B's feed-forward and its joint query, key and value projection.
DENSE_SHAPES = tuple(
    Shape(rows, inner, columns, 1, 4)
    for rows in (4096, 32768)
    for inner, columns in ((4096, 14336), (14336, 4096), (4096, 6144))
)
# Queries, keys and values of Llama-3.1-8B in one launch, of a prompt and of a decode step: rows, inner, columns, stack.
JOINT_SHAPES = ((4096, 4096, (4096, 1024, 1024), 4), (64, 4096, (4096, 1024, 1024), 4))
# Plain products of a decode step of 16 requests, and of one of 64.
DECODE_SHAPES = tuple(
    Shape(rows, inner, columns, 1, 4, gated)
    for rows in (16, 64)
    for inner, columns, gated in ((4096, 14336, True), (14336, 4096, False), (4096, 4096, False), (4096, 1024, False))
)
SHAPES = mixture_shapes(4096) + mixture_shapes(32768) + DENSE_SHAPES + DECODE_SHAPES
# One of each kind of program that the kernel comes in; the rest differ in sizes only.
DISTINCT_SHAPES = (
    Shape(40960, 2048, 512, 512, 1024, gated=True),
    Shape(40960, 512, 2048, 512, 1024),
    Shape(4096, 4096, 6144, 1, 4),
    Shape(16, 4096, 14336, 1, 4, gated=True),
    Shape(100, 640, 256, 1, 4),
)
