"""Prefix reuse on the host: which pages, rows and states are kept of which tokens, and who still needs them.

What a prefill computes up to its first drop depends on the tokens alone, and may serve any prompt that begins with the
same ones (notes: algorithm, "Prefix reuse"). It is kept page by page in a tree: a block holds the tokens of one page,
and its key is a hash over its parent's key and these tokens, down to a root that stands for everything else that keys
and values depend on. A hash alone is not trusted: tokens are compared. All of it lies in the pool that requests take
their pages from, so what nobody uses makes room for whoever needs it, least recently used first.

A block may hold pages of the leading attention layers, the hidden states ("rows") with which a drop layer hands its
tokens on, and a recurrent state after its last token. A prompt that drops can be served where all three reach its first
drop layer, a dense one where pages and states reach the last layer.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from jaxtyping import Int32

from uniprefill_jax.cache.pages import CacheError, PageAllocator, SlotAllocator

# Fewer tokens than this share of a page are not worth copying it.
LEAST_COPIED = 8
# Continuations of one prefix that are compared token by token, latest first.
COMPARED = 16

NO_PAGES = np.empty(0, np.int32)


@dataclass(frozen=True)
class PrefixShape:
    """What of a prefill depends on the tokens alone.

    Attributes:
        layers: leading attention layers whose pages do.
        linear_layers: leading linear layers whose states do.
        rows_of: the first drop layer, whose rows the drop gathers from; None where nothing is dropped.
        recomputed: tokens at the prompt's end that are computed anyway: their queries score the prompt, or the last
            one gives the first token.
    """

    layers: int
    linear_layers: int
    rows_of: int | None
    recomputed: int


@dataclass(eq=False)
class CachedBlock:
    """The tokens of one page, after those of its parents, and what is kept of them.

    Attributes:
        key: hash of everything that these tokens' keys and values depend on.
        parent: the block before; None for the root.
        tokens: a page of tokens, or the beginning of one.
        pages: pages of the leading attention layers.
        rows: for every drop layer whose rows are kept, their pages.
        state: slot of the recurrent state after the last token; -1 where there is none.
        state_layers: leading linear layers that it is right for.
        users: for every request that reads its pages, of how many layers.
        read: whether this step's programs read its rows, or copy its pages.
        attached: whether it can be found.
        children: what came after it, by key, oldest first.
    """

    key: bytes
    parent: "CachedBlock | None"
    tokens: Int32[np.ndarray, " tokens"]
    pages: Int32[np.ndarray, " layers"] = field(default_factory=lambda: NO_PAGES)
    rows: dict[int, Int32[np.ndarray, " row_pages"]] = field(default_factory=dict)
    state: int = -1
    state_layers: int = 0
    users: list[int] = field(default_factory=list)
    read: bool = False
    attached: bool = True
    children: "dict[bytes, CachedBlock]" = field(default_factory=dict)

    def serves(self, shape: PrefixShape) -> bool:
        """Whether pages and rows are there."""
        return len(self.pages) >= shape.layers and (shape.rows_of is None or shape.rows_of in self.rows)

    @property
    def row_pages(self) -> int:
        """Pages that hold rows."""
        return sum(map(len, self.rows.values()))

    @property
    def needed_layers(self) -> int:
        """Leading layers whose pages somebody reads."""
        return max(self.users, default=0)

    @property
    def evictable(self) -> int:
        """Pages that could be given back now."""
        return len(self.pages) - self.needed_layers + (0 if self.read else self.row_pages)


@dataclass(frozen=True)
class PrefixMatch:
    """What is kept of a prompt's beginning.

    Attributes:
        blocks: whole pages, in order.
        partial: a block whose first `partial_tokens` tokens go on from there.
        partial_tokens: how many.
        tokens: tokens in all.
        branch: tokens up to where pages are kept but no recurrent state is; 0 where that is no more than `tokens`.
        state: slot of the recurrent state after them; -1 where none is needed.
    """

    blocks: tuple[CachedBlock, ...] = ()
    partial: CachedBlock | None = None
    partial_tokens: int = 0
    tokens: int = 0
    branch: int = 0
    state: int = -1


class PrefixCache:
    """The tree of blocks, and the accounts of their pages and states.

    Attributes:
        page_size: tokens of a block.
        evictable_pages: pages that nobody needs, which `make_room` can give back.
    """

    def __init__(self, allocator: PageAllocator, identity: str, page_size: int, row_pages: int, num_states: int):
        """`identity` names all that keys and values depend on beside tokens; rows of a block take `row_pages` pages."""
        self.page_size = page_size
        self.evictable_pages = 0
        self._allocator = allocator
        self._row_pages = row_pages
        self._root = CachedBlock(sha256(identity.encode()).digest(), None, NO_PAGES)
        self._idle: OrderedDict[CachedBlock, None] = OrderedDict()  # without users, least recently used first
        self._with_rows: OrderedDict[CachedBlock, None] = OrderedDict()
        self._with_state: OrderedDict[CachedBlock, None] = OrderedDict()
        self._states = SlotAllocator(num_states)
        self._read: list[CachedBlock] = []
        self._copied: list[tuple[CachedBlock, int]] = []

    @property
    def root(self) -> CachedBlock:
        """Where every prompt begins."""
        return self._root

    def blocks(self) -> Iterator[CachedBlock]:
        """Every block that can be found."""
        stack = list(self._root.children.values())
        while stack:
            block = stack.pop()
            stack += block.children.values()
            yield block

    def match(self, tokens: Int32[np.ndarray, " prompt"], shape: PrefixShape) -> PrefixMatch:
        """The longest beginning of a prompt that can be reused; nothing is changed."""
        page, most = self.page_size, len(tokens) - shape.recomputed
        blocks: list[CachedBlock] = []
        block = self._root
        while (len(blocks) + 1) * page <= most:
            piece = tokens[len(blocks) * page : (len(blocks) + 1) * page]
            found = self._child(block, piece)
            if found is None or not found.serves(shape):
                break
            blocks.append(block := found)
        whole = len(blocks) * page
        if shape.linear_layers:
            while blocks and (blocks[-1].state < 0 or blocks[-1].state_layers < shape.linear_layers):
                blocks.pop()
            reused = len(blocks) * page
            state = blocks[-1].state if blocks else -1
            return PrefixMatch(tuple(blocks), None, 0, reused, whole if whole > reused else 0, state)
        partial, count = self._continuation(block, tokens[whole : min(whole + page, most)], shape)
        return PrefixMatch(tuple(blocks), partial, count, whole + count)

    def hold(self, match: PrefixMatch, shape: PrefixShape) -> None:
        """A request uses what was found: its whole pages until it lets go of them, all else in this step's programs."""
        for block in match.blocks:
            self.use(block, shape.layers)
            if shape.rows_of is not None:
                self._mark_read(block)
        if match.partial is not None:
            self.use(match.partial, shape.layers)
            self._mark_read(match.partial)
            self._copied.append((match.partial, shape.layers))
        if match.blocks and match.blocks[-1] in self._with_state:
            self._with_state.move_to_end(match.blocks[-1])

    def begin_step(self) -> None:
        """The programs of the step before are dispatched: what they read may go."""
        self._nothing_read()
        copied, self._copied = self._copied, []
        for block, layers in copied:
            self.release(block, layers)

    def use(self, block: CachedBlock, layers: int) -> None:
        """One more request reads the pages of so many leading layers."""
        with self._changing(block):
            block.users.append(layers)
        self._idle.pop(block, None)

    def release(self, block: CachedBlock, layers: int) -> None:
        """One request less does. Release a prompt's last block first: then it is also the first to be evicted."""
        with self._changing(block):
            block.users.remove(layers)
        if not block.users:
            if block.attached:
                self._idle[block] = None
            else:
                self._drop_unneeded(block)

    def child(self, parent: CachedBlock, tokens: Int32[np.ndarray, " tokens"]) -> CachedBlock | None:
        """The block of these tokens after `parent`, made where there is none; None where `parent` is gone."""
        if not parent.attached:
            return None
        found = self._child(parent, tokens)
        if found is None:
            key = _chained(parent.key, tokens)
            if key in parent.children:  # other tokens of the same hash
                return None
            found = parent.children[key] = CachedBlock(key, parent, np.array(tokens, np.int32))
            self._idle[found] = None
        return found

    def wants_pages(self, block: CachedBlock, layers: int) -> bool:
        """Whether pages of so many leading layers would make the block better."""
        return len(block.pages) < layers and not block.users

    def give_pages(self, block: CachedBlock, pages: Int32[np.ndarray, " layers"]) -> None:
        """Pages of the leading layers, from a request that goes on using them; the block's own ones are given back."""
        if not self.wants_pages(block, len(pages)):
            raise CacheError("a block is given pages that it has, or that somebody uses")
        with self._changing(block):
            old, block.pages = block.pages, pages
        self._allocator.free(old)
        self.use(block, len(pages))

    def take_row_pages(self, block: CachedBlock, layer: int) -> Int32[np.ndarray, " row_pages"] | None:
        """Pages for a block's rows at a drop layer; None where there is no room."""
        # Not at the expense of rows of requests in progress: their own would go.
        if not self._evict_idle(self._row_pages, keep=block) or not block.attached:
            return None
        ids = self._allocator.allocate(self._row_pages)
        with self._changing(block):
            block.rows[layer] = ids
        self._with_rows[block] = None
        return ids

    def take_state(self, block: CachedBlock, linear_layers: int) -> int:
        """A slot for the recurrent state after a block, the least recently used one; -1 where there is none."""
        if not block.attached or not self._states.count:
            return -1
        if block.state < 0:
            if not self._states.free_slots:
                self._drop_state(next(iter(self._with_state)))
            block.state = self._states.allocate()
        block.state_layers = linear_layers
        self._with_state[block] = None
        self._with_state.move_to_end(block)
        return block.state

    def make_room(self, pages: int) -> bool:
        """Give pages back until so many are available; False, and nothing changed, where that cannot be."""
        if self._allocator.available_pages + self.evictable_pages < pages:
            return False
        if not self._evict_idle(pages):
            self._trim_used(pages)
        return True

    def pinned_by(self, match: PrefixMatch, shape: PrefixShape) -> int:
        """Pages that `hold` would take out of `evictable_pages`."""
        count = 0
        for block in (*match.blocks, *((match.partial,) if match.partial else ())):
            reads = shape.rows_of is not None or block is match.partial
            count += max(shape.layers - block.needed_layers, 0) + (block.row_pages if reads and not block.read else 0)
        return count

    def clear(self) -> None:
        """Forget everything. Between steps only; what requests use goes when they let go of it."""
        self._nothing_read()
        for block in list(self._root.children.values()):
            self._detach(block)

    def _child(self, parent: CachedBlock, tokens: Int32[np.ndarray, " tokens"]) -> CachedBlock | None:
        found = parent.children.get(_chained(parent.key, tokens))
        return found if found is not None and np.array_equal(found.tokens, tokens) else None

    def _continuation(
        self, parent: CachedBlock, tokens: Int32[np.ndarray, " tokens"], shape: PrefixShape
    ) -> tuple[CachedBlock | None, int]:
        """The child that begins with most of these tokens, and with how many of them."""
        best, most = None, max(self.page_size // LEAST_COPIED, 1) - 1
        for number, child in enumerate(reversed(parent.children.values())):
            if number == COMPARED:
                break
            length = min(len(child.tokens), len(tokens))
            differs = np.flatnonzero(child.tokens[:length] != tokens[:length])
            count = int(differs[0]) if len(differs) else length
            if count > most and child.serves(shape):
                best, most = child, count
        return best, most if best is not None else 0

    def _evict_idle(self, pages: int, keep: CachedBlock | None = None) -> bool:
        """Evict blocks without users until so many pages are available; False where there are too few."""
        while self._allocator.available_pages < pages:
            block = next((block for block in self._idle if block is not keep), None)
            if block is None:
                return False
            self._detach(block)
        return True

    def _trim_used(self, pages: int) -> None:
        """Give back what no user of a block needs: rows, then pages of later layers."""
        for block in [block for block in self._with_rows if not block.read]:
            if self._allocator.available_pages >= pages:
                return
            self._drop_rows(block)
        for block in self.blocks():
            if self._allocator.available_pages >= pages:
                return
            self._drop_unneeded(block)

    def _detach(self, block: CachedBlock) -> None:
        """Make a block and all that came after it impossible to find; what nobody needs of them is free at once."""
        assert block.parent is not None
        del block.parent.children[block.key]
        stack = [block]
        while stack:
            gone = stack.pop()
            stack += gone.children.values()
            gone.children.clear()
            gone.attached = False
            if gone.state >= 0:
                self._drop_state(gone)
            self._idle.pop(gone, None)
            self._drop_rows(gone)
            self._drop_unneeded(gone)

    def _drop_unneeded(self, block: CachedBlock) -> None:
        with self._changing(block):
            excess, block.pages = block.pages[block.needed_layers :], block.pages[: block.needed_layers]
        self._allocator.free(excess)

    def _drop_rows(self, block: CachedBlock) -> None:
        if self._with_rows.pop(block, 0) is None:
            with self._changing(block):
                rows, block.rows = block.rows, {}
            self._allocator.free(np.concatenate(list(rows.values())))

    def _drop_state(self, block: CachedBlock) -> None:
        del self._with_state[block]
        self._states.free(block.state)
        block.state = -1

    def _nothing_read(self) -> None:
        for block in self._read:
            with self._changing(block):
                block.read = False
        self._read.clear()

    def _mark_read(self, block: CachedBlock) -> None:
        if not block.read:
            with self._changing(block):
                block.read = True
            self._read.append(block)

    @contextmanager
    def _changing(self, block: CachedBlock) -> Iterator[None]:
        """Keep the count of evictable pages over a change of one block."""
        self.evictable_pages -= block.evictable
        yield
        self.evictable_pages += block.evictable


def _chained(parent: bytes, tokens: Int32[np.ndarray, " tokens"]) -> bytes:
    return sha256(parent + np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
