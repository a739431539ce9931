"""Page and slot accounts: no page is anybody's twice, and what is given back wrongly is an error, not a guess."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniprefill_jax.cache.pages import CacheError, PageAllocator, SlotAllocator
from uniprefill_jax.cache.tables import RequestPages


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "free", "reserve", "release"]), st.integers(0, 12)), max_size=60)
)
def test_pages_in_use_are_disjoint_and_counted(operations):
    freed: list[int] = []
    pages = PageAllocator(32, on_free=lambda ids: freed.extend(ids.tolist()))
    held: list[np.ndarray] = []
    reserved = given_back = 0
    for name, count in operations:
        if name == "free":
            if held:
                ids = held.pop(count % len(held))
                pages.free(ids)
                given_back += len(ids)
            continue
        available = 32 - sum(map(len, held)) - reserved
        possible = count <= (reserved if name == "release" else available)
        if not possible:
            with pytest.raises(CacheError):
                getattr(pages, name)(count)
            continue
        result = getattr(pages, name)(count)
        if name == "allocate":
            held.append(result)
        else:
            reserved += count if name == "reserve" else -count
        taken = np.concatenate(held) if held else np.empty(0, int)
        assert len(np.unique(taken)) == len(taken) == pages.used_pages
        assert pages.reserved_pages == reserved and pages.available_pages == 32 - len(taken) - reserved
    assert len(freed) == given_back


@pytest.mark.parametrize("wrong", [[8], [-1], [0, 0], [3], [0, 3]])
def test_wrong_ids_change_nothing(wrong):
    pages = PageAllocator(8)
    assert sorted(pages.allocate(2)) == [0, 1]
    before = (pages.free_pages, pages.used_pages)
    with pytest.raises(CacheError):
        pages.free(np.asarray(wrong))
    assert (pages.free_pages, pages.used_pages) == before


def test_a_page_given_back_twice_is_an_error():
    pages = PageAllocator(8)
    ids = pages.allocate(3)
    pages.free(ids[:1])
    with pytest.raises(CacheError, match="not in use"):
        pages.free(ids)
    assert pages.used_pages == 2


def test_slots():
    slots = SlotAllocator(2)
    taken = {slots.allocate(), slots.allocate()}
    assert taken == {0, 1}
    with pytest.raises(CacheError):
        slots.allocate()
    slots.free(1)
    for wrong in (1, 2, -1):
        with pytest.raises(CacheError):
            slots.free(wrong)
    assert slots.free_slots == 1


def test_segments_take_the_pages_of_their_own_lengths():
    pages = PageAllocator(64)
    request = RequestPages(pages, page_size=8, num_layers=5)
    request.open_segment((0, 1), 33)
    request.open_segment((2, 3, 4), 16)
    assert pages.used_pages == 2 * 5 + 3 * 2
    with pytest.raises(CacheError):
        request.open_segment((4,), 1)
    assert request.lengths().tolist() == [33, 33, 16, 16, 16]
    table = request.device_table(width=6, absent=64)
    assert (table == 64).sum() == 2 * 1 + 3 * 4
    used = table[table < 64]
    assert len(np.unique(used)) == len(used)
    # The later layers stand at a page boundary, the first two do not.
    assert request.pages_for_next_token() == 3
    new = request.append_token()
    assert [(layer, column) for layer, column, _ in new] == [(2, 2), (3, 2), (4, 2)]
    assert request.pages_for_next_token() == 0 and request.lengths().tolist() == [34, 34, 17, 17, 17]
    request.free()
    assert pages.used_pages == 0 and not request.segments
    request.free()


def test_shared_and_handed_over_pages_are_not_given_back():
    freed: list[int] = []
    pages = PageAllocator(32, on_free=lambda ids: freed.extend(ids.tolist()))
    shared = pages.allocate(4).reshape(2, 2)
    request = RequestPages(pages, page_size=8, num_layers=3)
    request.open_segment((0, 1, 2), 30, shared)
    assert pages.used_pages == 4 + 3 * 4 - 4
    np.testing.assert_array_equal(request.device_table(4, 32)[:2, :2], shared)
    with pytest.raises(CacheError, match="column 1"):
        request.hand_over(1, 2)
    given = request.hand_over(2, 2)
    for _ in range(3):
        request.append_token()
    assert request.lengths().tolist() == [33] * 3 and pages.used_pages == 15
    request.free()
    assert len(freed) == 9 and not set(freed) & {*shared.reshape(-1).tolist(), *given.tolist()}
