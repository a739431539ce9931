"""Workload shapes of top-p selection, shared by tests and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call: `batch` requests of up to `length` tokens each, in blocks of `block_size`."""

    batch: int
    length: int
    block_size: int = 64

    @property
    def rows(self) -> int:
        """Rows of the packed arrays."""
        return self.batch * self.length

    @property
    def num_blocks(self) -> int:
        """Blocks per request."""
        return -(-self.length // self.block_size)


SHAPES = (
    *(Shape(1, length) for length in (1024, 4096, 16384, 65536, 131072, 1048576)),
    *(Shape(16, length) for length in (1024, 4096, 16384, 65536)),
)
LARGEST = Shape(64, 1048576)  # 64 requests of 16,384 blocks each
DISTINCT_SHAPES = (Shape(16, 1024),)
