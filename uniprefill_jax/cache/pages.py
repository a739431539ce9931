"""Page numbers on the host: which are free, which are in use, which are promised.

A page holds `page_size` tokens of one attention layer, so a request that drops tokens takes fewer pages in its later
layers, and what it leaves is any other request's. Every id is checked here, where an error can still be raised: on the
device a wrong index would be clamped or dropped without a word.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32


class CacheError(RuntimeError):
    """A page or slot was used against the rules: a fault of the engine, never of a request."""


class PageAllocator:
    """Hands out page numbers [0, num_pages).

    A reservation is a promise of that many pages, without saying which: `available` pages are free and not promised.

    Attributes:
        num_pages: pages in all.
        on_free: called with the ids of pages that have just become free (tests poison them).
    """

    def __init__(self, num_pages: int, on_free: Callable[[np.ndarray], None] | None = None):
        if num_pages < 1:
            raise CacheError(f"a pool of {num_pages} pages cannot hold anything")
        self.num_pages = num_pages
        self.on_free = on_free
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack: its first `_free_count` entries
        self._free_count = num_pages
        self._in_use = np.zeros(num_pages, bool)
        self._reserved = 0

    @property
    def free_pages(self) -> int:
        """Pages not in use."""
        return self._free_count

    @property
    def reserved_pages(self) -> int:
        """Free pages that are promised."""
        return self._reserved

    @property
    def available_pages(self) -> int:
        """Free pages that nobody was promised."""
        return self._free_count - self._reserved

    @property
    def used_pages(self) -> int:
        """Pages in use."""
        return self.num_pages - self._free_count

    def reserve(self, count: int) -> None:
        """Promise `count` pages; CacheError where fewer are available."""
        if count < 0 or count > self.available_pages:
            raise CacheError(f"cannot reserve {count} pages: {self.available_pages} are available")
        self._reserved += count

    def release(self, count: int) -> None:
        """Take back the promise of `count` pages."""
        if count < 0 or count > self._reserved:
            raise CacheError(f"cannot release {count} reserved pages: {self._reserved} are reserved")
        self._reserved -= count

    def allocate(self, count: int) -> Int32[np.ndarray, " count"]:
        """Take `count` pages that nobody was promised; whoever holds a promise releases it first."""
        if count < 0 or count > self.available_pages:
            raise CacheError(f"cannot allocate {count} pages: {self.available_pages} are available")
        ids = self._free[self._free_count - count : self._free_count][::-1].copy()
        self._free_count -= count
        self._in_use[ids] = True
        return ids

    def free(self, ids: Int32[np.ndarray, " count"]) -> None:
        """Give pages back; CacheError, and nothing changed, for an id out of range, twice, or not in use."""
        ids = np.asarray(ids, np.int32).reshape(-1)
        if not len(ids):
            return
        if ids.min() < 0 or ids.max() >= self.num_pages:
            wrong = ids[(ids < 0) | (ids >= self.num_pages)][0]
            raise CacheError(f"page {wrong} is outside the pool of {self.num_pages} pages")
        if len(np.unique(ids)) != len(ids):
            raise CacheError("a page is given back twice in one call")
        if not self._in_use[ids].all():
            raise CacheError(f"page {ids[~self._in_use[ids]][0]} is given back but not in use")
        self._in_use[ids] = False
        self._free[self._free_count : self._free_count + len(ids)] = ids
        self._free_count += len(ids)
        if self.on_free is not None:
            self.on_free(ids)


class SlotAllocator:
    """Hands out request slots [0, count): rows of the decode batch, and with them recurrent-state slots."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Slots not in use."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a slot; CacheError where none is free."""
        if not self._free:
            raise CacheError(f"all {self.count} slots are in use")
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Give a slot back; CacheError for one out of range or not in use."""
        if not 0 <= slot < self.count or slot in self._free:
            raise CacheError(f"slot {slot} of {self.count} is given back but not in use")
        self._free.append(slot)
