"""Workload shapes of row compaction, shared by tests and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call: rows of `width` elements of `dtype`."""

    rows: int
    width: int
    dtype: str = "bfloat16"


SHAPES = tuple(Shape(rows, 4096) for rows in (1024, 4096, 16384, 65536, 131072)) + (
    Shape(65536, 3840),
    Shape(65536, 2048),
)
DISTINCT_SHAPES = (Shape(4096, 4096), Shape(1000, 1152, "float32"))
