"""One request's page tables, one per segment: layers between two drops hold the same tokens and share one length."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32

from uniprefill_jax.cache.pages import CacheError, PageAllocator


@dataclass
class SegmentTable:
    """Pages of one segment.

    Attributes:
        layers: the segment's layers, numbered among the model's attention layers.
        length: tokens that every one of them held when the segment was opened.
        ids: page numbers, one row per layer; column j holds tokens [j * page_size, (j + 1) * page_size).
        owned: which of them are this request's alone; the others belong to the prefix cache.
    """

    layers: tuple[int, ...]
    length: int
    ids: Int32[np.ndarray, "layers pages"]
    owned: Bool[np.ndarray, "layers pages"]


class RequestPages:
    """All pages of one request, taken from and given back to one allocator.

    Attributes:
        segments: page tables.
        num_layers: attention layers of the model.
        appended: tokens that every layer holds behind those.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, num_layers: int):
        self.segments: list[SegmentTable] = []
        self.num_layers = num_layers
        self.appended = 0
        self._room = 0  # tokens that can be appended before any segment needs a page
        self._allocator = allocator
        self._page_size = page_size

    def open_segment(
        self,
        layers: tuple[int, ...],
        length: int,
        shared: Int32[np.ndarray, "shared_layers shared_pages"] | None = None,
    ) -> None:
        """Take the pages of one more segment that holds `length` tokens.

        `shared` are pages of the prefix cache, for the first tokens of the first of these layers.
        """
        taken = {layer for segment in self.segments for layer in segment.layers}
        if taken & set(layers) or any(not 0 <= layer < self.num_layers for layer in layers):
            raise CacheError(f"layers {layers} overlap {sorted(taken)} or exceed {self.num_layers} attention layers")
        owned = np.ones((len(layers), pages_of(length, self._page_size)), bool)
        ids = np.empty(owned.shape, np.int32)
        if shared is not None:
            place = np.s_[: shared.shape[0], : shared.shape[1]]
            owned[place], ids[place] = False, shared
        ids[owned] = self._allocator.allocate(int(owned.sum()))
        self.segments.append(SegmentTable(tuple(layers), length, ids, owned))
        self._measure_room()

    def hand_over(self, column: int, layers: int) -> Int32[np.ndarray, " layers"]:
        """Pages of a column, of the first segment's leading layers, that become the prefix cache's; still readable."""
        segment = self.segments[0]
        if not segment.owned[:layers, column].all():
            raise CacheError(f"column {column} is not the request's own to hand over")
        segment.owned[:layers, column] = False
        return segment.ids[:layers, column].copy()

    def pages_for_next_token(self) -> int:
        """Pages that one more token of every layer needs."""
        return 0 if self._room else sum(len(segment.layers) for segment in self._full_segments())

    def append_token(self) -> list[tuple[int, int, int]]:
        """Make room for one more token in every layer; the new pages as (layer, column, id)."""
        new = []
        if self._room:
            self.appended += 1
            self._room -= 1
            return new
        for segment in self._full_segments():
            column = segment.ids.shape[1]
            ids = self._allocator.allocate(len(segment.layers))
            segment.ids = np.concatenate([segment.ids, ids[:, None]], axis=1)
            segment.owned = np.concatenate([segment.owned, np.ones((len(ids), 1), bool)], axis=1)
            new += [(layer, column, int(page)) for layer, page in zip(segment.layers, ids, strict=True)]
        self.appended += 1
        self._measure_room()
        return new

    def free(self) -> None:
        """Give back every page that is the request's own."""
        segments, self.segments = self.segments, []
        if segments:
            self._allocator.free(np.concatenate([segment.ids[segment.owned] for segment in segments]))

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
            lengths[list(segment.layers)] = segment.length + self.appended
        return lengths

    def _full_segments(self) -> list[SegmentTable]:
        return [segment for segment in self.segments if not self._free_places(segment)]

    def _free_places(self, segment: SegmentTable) -> int:
        return segment.ids.shape[1] * self._page_size - segment.length - self.appended

    def _measure_room(self) -> None:
        self._room = min(map(self._free_places, self.segments))


def pages_of(tokens: int, page_size: int) -> int:
    """Pages of one layer that hold `tokens` tokens."""
    return -(-tokens // page_size)
