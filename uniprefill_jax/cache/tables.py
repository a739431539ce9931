"""One request's page tables, one per segment: layers between two drops hold the same tokens and share one length."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from uniprefill_jax.cache.pages import CacheError, PageAllocator


@dataclass
class SegmentTable:
    """Pages of one segment.

    Attributes:
        layers: the segment's layers, numbered among the model's attention layers.
        length: tokens that every one of them holds.
        ids: page numbers, one row per layer; column j holds tokens [j * page_size, (j + 1) * page_size).
    """

    layers: tuple[int, ...]
    length: int
    ids: Int32[np.ndarray, "layers pages"]


class RequestPages:
    """All pages of one request, taken from and given back to one allocator."""

    def __init__(self, allocator: PageAllocator, page_size: int, num_layers: int):
        self.segments: list[SegmentTable] = []
        self.num_layers = num_layers
        self._allocator = allocator
        self._page_size = page_size

    @property
    def count(self) -> int:
        """Pages held."""
        return sum(segment.ids.size for segment in self.segments)

    def open_segment(self, layers: tuple[int, ...], length: int) -> None:
        """Take the pages of one more segment that holds `length` tokens."""
        taken = {layer for segment in self.segments for layer in segment.layers}
        if taken & set(layers) or any(not 0 <= layer < self.num_layers for layer in layers):
            raise CacheError(f"layers {layers} overlap {sorted(taken)} or exceed {self.num_layers} attention layers")
        pages = pages_of(length, self._page_size)
        ids = self._allocator.allocate(len(layers) * pages).reshape(len(layers), pages)
        self.segments.append(SegmentTable(tuple(layers), length, ids))

    def pages_for_next_token(self) -> int:
        """Pages that one more token of every layer needs."""
        return sum(len(segment.layers) for segment in self._full_segments())

    def append_token(self) -> list[tuple[int, int, int]]:
        """Make room for one more token in every layer; the new pages as (layer, column, id)."""
        new = []
        for segment in self._full_segments():
            column = segment.ids.shape[1]
            ids = self._allocator.allocate(len(segment.layers))
            segment.ids = np.concatenate([segment.ids, ids[:, None]], axis=1)
            new += [(layer, column, int(page)) for layer, page in zip(segment.layers, ids, strict=True)]
        for segment in self.segments:
            segment.length += 1
        return new

    def free(self) -> None:
        """Give every page back."""
        segments, self.segments = self.segments, []
        if segments:
            self._allocator.free(np.concatenate([segment.ids.reshape(-1) for segment in segments]))

    def device_table(self, width: int, absent: int) -> Int32[np.ndarray, "layers width"]:
        """Page numbers of every attention layer, `absent` where there is no page."""
        table = np.full((self.num_layers, width), absent, np.int32)
        for segment in self.segments:
            table[list(segment.layers), : segment.ids.shape[1]] = segment.ids
        return table

    def lengths(self) -> Int32[np.ndarray, " layers"]:
        """Tokens that every attention layer holds; 0 for layers whose segment is not open."""
        lengths = np.zeros(self.num_layers, np.int32)
        for segment in self.segments:
            lengths[list(segment.layers)] = segment.length
        return lengths

    def _full_segments(self) -> list[SegmentTable]:
        return [segment for segment in self.segments if segment.length == segment.ids.shape[1] * self._page_size]


def pages_of(tokens: int, page_size: int) -> int:
    """Pages of one layer that hold `tokens` tokens."""
    return -(-tokens // page_size)
