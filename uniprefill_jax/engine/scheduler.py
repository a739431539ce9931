"""Who gets pages, slots and the next step's token budget. Host bookkeeping only: nothing here touches the device.

First come first served within a priority. A request is admitted when a slot is free and its worst case fits: every
layer keeps the whole prompt. It is admitted only when its first chunk can run, so that it finds whatever those before
it have left in the prefix cache. What a drop leaves over goes back at once. Generated tokens take pages as they grow;
where none is left, not even in the prefix cache, the admitted request that ranks last gives all of its own back and
waits to be computed again. The request that ranks first is never preempted and fits the pool alone, so every step makes
progress. Requests that go through the same programs share chunks: few rows alone would waste the weights they read.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from jaxtyping import Int32

from uniprefill_jax.cache.pages import CacheError, PageAllocator, SlotAllocator
from uniprefill_jax.cache.prefix import PrefixCache, PrefixMatch
from uniprefill_jax.cache.tables import RequestPages, pages_of
from uniprefill_jax.config import EngineConfig
from uniprefill_jax.engine.plans import DecodeRow, Piece, StepPlan, Unit
from uniprefill_jax.engine.requests import Pack, Request, RequestState
from uniprefill_jax.errors import InputError

FEWEST = 4  # a chunk that is not a stage's last has at least this part of a step's budget
MOST_MEMBERS = 16  # requests in one chunk


class Scheduler:
    """Requests by state, and the accounts of pages and slots.

    Attributes:
        budget: most prompt tokens of one step, through one part of a stage. While others decode, a row counts the more
            the more rows it sees: a step's time is what they wait.
        prefix: what is kept of tokens that were read before; None: nothing.
        queried_tokens: prompt tokens that were looked up in it.
        hit_tokens: how many of them were found.
    """

    def __init__(self, config: EngineConfig, num_attention_layers: int, identity: str = "", row_pages: int = 1):
        """`identity` and `row_pages` as for `PrefixCache`."""
        self.config = config
        self.budget = config.prefill_chunk
        self.num_layers = num_attention_layers
        self.pages = PageAllocator(config.pool_pages)
        self.prefix: PrefixCache | None = None
        if config.prefix_reuse:
            self.prefix = PrefixCache(self.pages, identity, config.page_size, row_pages, config.state_checkpoints)
        self.queried_tokens = self.hit_tokens = 0
        self._no_room: tuple[Request, int] | None = None
        self.slots = SlotAllocator(config.max_running)
        self.waiting: list[Request] = []
        self.admitted: list[Request] = []

    def check_fits(self, prompt_length: int, limit: int) -> None:
        """Raise InputError for a request that could not finish even with the whole pool to itself."""
        needed = self._worst_pages(prompt_length + limit - 1)
        if needed > self.config.pool_pages:
            raise InputError(
                f"the request needs up to {needed} pages ({self.num_layers} attention layers x "
                f"{prompt_length + limit - 1} tokens in pages of {self.config.page_size}), the pool has "
                f"{self.config.pool_pages}; shorten the prompt ({prompt_length} tokens), lower max_tokens ({limit}) or "
                "raise pool_pages"
            )

    def longest_request(self) -> int:
        """Most tokens, prompt and generated ones, that the whole pool holds for one request that drops nothing."""
        return self.config.pool_pages // self.num_layers * self.config.page_size

    def submit(self, request: Request) -> None:
        """Queue a request; InputError where it can never fit."""
        self.check_fits(len(request.prompt), request.limit)
        self._wait(request)

    def schedule(self) -> StepPlan:
        """Decide the next step; pages are taken and states moved on as if it had been run."""
        plan = StepPlan()
        if self.prefix is not None:
            self.prefix.begin_step()
        self._plan_decode(plan)
        self._plan_prefill(plan)
        return plan

    def drop_read(self, request: Request, kept: int) -> None:
        """The host has read how many tokens a drop kept: the next segment's pages are taken, the rest is let go."""
        if request.state is not RequestState.PREFILLING or not request.awaits_drop:
            raise CacheError(f"request {request.id} awaits no drop")
        request.awaits_drop = False
        self._open_segment(request, kept)
        request.stage += 1
        request.row, request.rows = 0, kept

    def finish(self, request: Request, reason: str) -> None:
        """End a request, wherever it is; everything that it holds is free again."""
        if request.ended:
            raise CacheError(f"request {request.id} has already ended")
        if request.admitted:
            self._give_back(request)
        else:
            self.waiting.remove(request)
        request.state = RequestState.CANCELLED if reason == "cancelled" else RequestState.FINISHED
        request.finish_reason = reason

    def in_state(self, state: RequestState) -> list[Request]:
        """Admitted requests in a state, by rank."""
        return [request for request in self.admitted if request.state is state]

    def _plan_decode(self, plan: StepPlan) -> None:
        for request in self.in_state(RequestState.RUNNING):
            if request.state is not RequestState.RUNNING or request.dispatched >= request.limit:
                continue
            assert request.pages is not None
            needed = request.pages.pages_for_next_token()
            if needed:
                while request.admitted and not self._make_room(needed):
                    self._preempt(self.admitted[-1], plan)
                if not request.admitted:
                    continue
            plan.decode.append(DecodeRow(request, request.pages.append_token()))
            request.dispatched += 1

    def _plan_prefill(self, plan: StepPlan) -> None:
        budget = self.budget
        priced = bool(plan.decode)
        queue = deque(self.in_state(RequestState.PREFILLING))
        while budget:
            first = queue[0] if queue else None
            if self.waiting and (first is None or self.waiting[0].rank < first.rank):
                first = self._admit(plan, budget, priced) or first
            if first is None:
                return
            if queue and queue[0] is first:
                queue.popleft()
            while first.state is RequestState.PREFILLING and not first.awaits_drop and budget:
                pack = first.pack
                if pack is None:
                    pack = self._new_pack(first, queue, budget, priced, plan)
                elif self._cost(pack, priced) > budget and budget < self.budget:
                    break
                if pack is None:
                    break
                budget -= min(self._cost(pack, priced), budget)
                plan.units.append(self._next_unit(pack))

    def _new_pack(
        self, first: Request, queue: deque[Request], budget: int, priced: bool, plan: StepPlan
    ) -> Pack | None:
        """The next chunk of a request, and beside it of others that go through the same programs; None: not now.

        Others are those that queue behind it, and those that wait, which are admitted for it and then queue too.
        """
        first.chunk = self._chunk_rows(first, budget, priced)
        if not first.chunk:
            return None
        pack = first.pack = Pack(first.stage, 0, [first])
        kind = first.shape.kind
        for other in queue:
            if len(pack.members) == MOST_MEMBERS:
                return pack
            free = other.state is RequestState.PREFILLING and not other.awaits_drop and other.pack is None
            if free and (other.stage, other.shape.kind) == (pack.stage, kind):
                self._join(pack, other, budget - self._cost(pack, priced), priced)
        while self.waiting and len(pack.members) < MOST_MEMBERS and self._fits_beside(pack, self.waiting[0]):
            left = budget - self._cost(pack, priced)
            other = self._admit(plan, left, priced)
            if other is None:
                return pack
            queue.append(other)
            self._join(pack, other, left, priced)
        return pack

    def _join(self, pack: Pack, other: Request, budget: int, priced: bool) -> None:
        """Add a request's next rows to a chunk, if any are worth it."""
        other.chunk = self._chunk_rows(other, budget, priced)
        if other.chunk:
            other.pack = pack
            pack.members.append(other)

    def _fits_beside(self, pack: Pack, waiting: Request) -> bool:
        """Whether a request that waits could begin in this chunk, and gains nothing by waiting for its end.

        One that begins like a member is better off with what that one will leave in the prefix cache.
        """
        page = self.config.page_size
        alike = self.prefix is not None and any(
            np.array_equal(member.prompt[:page], waiting.prompt[:page]) for member in pack.members
        )
        return not pack.stage and waiting.shape.kind == pack.members[0].shape.kind and not alike

    @staticmethod
    def _cost(pack: Pack, priced: bool) -> int:
        """What the next part of a chunk takes of the budget; `priced` counts what rows see, otherwise a row costs 1."""
        prices = pack.members[0].shape.stages[pack.stage].parts[pack.part]
        return sum(math.ceil(member.chunk * (prices.of(member.row) if priced else 1.0)) for member in pack.members)

    def _admit(self, plan: StepPlan, budget: int, priced: bool) -> Request | None:
        """Let the first that waits in, if there is room for it and its first chunk can run in this step.

        Programs of this step read what it reuses: later that may be gone.
        """
        request = self.waiting[0]
        match = self._room_for(request, budget, priced) if self.slots.free_slots else None
        if match is None:
            return None
        self.waiting.pop(0)
        request.state = RequestState.PREFILLING
        request.slot = self.slots.allocate()
        request.pages = RequestPages(self.pages, self.config.page_size, self.num_layers)
        shape = request.shape.prefix
        request.reserved = self._worst_pages(len(request.prompt)) - shape.layers * len(match.blocks)
        self.pages.reserve(request.reserved)
        request.dispatched = 0
        request.awaits_drop = False
        request.segment_lengths = []
        request.blocks, request.noted_pages = list(match.blocks), len(match.blocks)
        shared = None
        if self.prefix is not None:
            request.last_block = match.blocks[-1] if match.blocks else self.prefix.root
            if match.blocks:
                shared = np.stack([block.pages[: shape.layers] for block in match.blocks], axis=1)
            if not request.preemptions:
                self.queried_tokens += len(request.prompt)
                self.hit_tokens += match.tokens
        self._insert(self.admitted, request)
        self._open_segment(request, len(request.prompt), shared)
        plan.admitted.append(request)
        return request

    def _room_for(self, request: Request, budget: int, priced: bool) -> PrefixMatch | None:
        """Make room for a request, and hold what is there of its beginning; None where there is too little of either
        room or budget."""
        # One that was preempted will need room for its own tokens again: do not let it in to be thrown out.
        worst = self._worst_pages(len(request.prompt) + len(request.generated))
        room = self.pages.available_pages
        if self.prefix is not None:
            room += self.prefix.evictable_pages
            if self._no_room is not None and self._no_room[0] is request and room <= self._no_room[1]:
                return None
            shape = request.shape.prefix
            match = self.prefix.match(request.prompt, shape)
            needed = worst - shape.layers * len(match.blocks)
            if needed <= room - self.prefix.pinned_by(match, shape):
                if not self._begin(request, match, budget, priced):
                    return None
                self.prefix.hold(match, shape)
                self._make_room(needed)
                return match
        if worst > room:
            self._no_room = request, room
            return None
        # What holds its beginning was in its way: pages of later layers, or rows.
        if not self._begin(request, PrefixMatch(), budget, priced):
            return None
        self._make_room(worst)
        return request.reused

    def _begin(self, request: Request, match: PrefixMatch, budget: int, priced: bool) -> bool:
        """Put a request at its first row to be computed; whether a chunk from there is worth beginning now."""
        request.reused = match
        request.stage, request.row, request.rows = 0, match.tokens, len(request.prompt)
        return self._chunk_rows(request, budget, priced) > 0

    def _next_unit(self, pack: Pack) -> Unit:
        """A chunk through its next part; after the last one its members move on."""
        members, part = list(pack.members), pack.part
        pack.part += 1
        ends = pack.part == len(members[0].shape.stages[pack.stage].parts)
        if ends:
            pieces = tuple(map(self._end_chunk, members))
        else:
            pieces = tuple(Piece(member, member.row, member.chunk) for member in members)
        return Unit(pack, pack.stage, part, pieces, ends)

    def _chunk_rows(self, request: Request, budget: int, priced: bool) -> int:
        """Rows of a request's next chunk; 0: better none in this step."""
        left = request.rows - request.row
        few = max(self.budget // FEWEST, 1)
        price = request.shape.stages[request.stage].parts[0].of(request.row) if priced else 1.0
        affordable = int(budget / price)
        if budget == self.budget:
            affordable = max(affordable, few)
        elif affordable < min(few, left):
            return 0  # not worth the weights that it would read
        count = min(affordable, left)
        if few < count < left:
            count -= count % few
        return self._to_checkpoint(request, count, budget) if request.stage == 0 else count

    def _end_chunk(self, request: Request) -> Piece:
        """The last part of a request's chunk: it moves on."""
        stages = request.shape.stages
        start, count = request.row, request.chunk
        ends_stage = start + count == request.rows
        ends_prefill = ends_stage and request.stage + 1 == len(stages)
        piece = Piece(request, start, count, ends_stage, ends_prefill)
        request.row += count
        request.pack, request.chunk = None, 0
        if request.stage == 0 and request.last_block is not None:
            piece = self._note_prompt(request, piece)
        if ends_prefill:
            request.state = RequestState.RUNNING
            request.dispatched = 1
        elif ends_stage and stages[request.stage].drops:
            request.awaits_drop = True
        elif ends_stage:
            # Kept rows have gone back among all rows.
            request.stage += 1
            request.row, request.rows = 0, len(request.prompt)
        return piece

    def _open_segment(
        self, request: Request, length: int, shared: Int32[np.ndarray, "layers pages"] | None = None
    ) -> None:
        """Take the pages of the next segment out of the promise, and shrink it to what may still be needed."""
        assert request.pages is not None
        number = len(request.segment_lengths)
        to_come = sum(len(layers) for layers in request.shape.segments[number + 1 :])
        longest = len(request.prompt) if request.shape.carries else length
        self.pages.release(request.reserved)
        request.pages.open_segment(request.shape.segments[number], length, shared)
        request.reserved = to_come * pages_of(longest, self.config.page_size)
        self.pages.reserve(request.reserved)
        request.segment_lengths.append(length)

    def _to_checkpoint(self, request: Request, count: int, budget: int) -> int:
        """How many of a chunk's rows to take, so that a recurrent state is left where another prompt may go on.

        0: better none in this step.
        """
        if self.prefix is None or not request.shape.prefix.linear_layers:
            return count
        end = request.row + count
        if request.row < request.reused.branch < end:
            return request.reused.branch - request.row
        if end < request.rows:
            end -= end % self.config.page_size
        if end <= request.row and budget == self.budget:
            return count
        return max(end - request.row, 0)

    def _note_prompt(self, request: Request, piece: Piece) -> Piece:
        """Hand the pages that a chunk of the first stage fills to the prefix cache; its piece saves rows and state."""
        assert self.prefix is not None
        shape, page = request.shape.prefix, self.config.page_size
        saved = []
        for column in range(request.noted_pages, request.row // page):
            self._note_page(request, request.prompt[column * page : (column + 1) * page])
            block = request.last_block
            if block is None:
                return replace(piece, saved_rows=tuple(saved))
            if shape.rows_of is not None and shape.rows_of not in block.rows:
                ids = self.prefix.take_row_pages(block, shape.rows_of)
                if ids is not None:
                    saved.append((column, ids))
        state = -1
        block = request.last_block
        if shape.linear_layers and block is not None and request.noted_pages * page == request.row:
            if block.parent is not None and (block.state < 0 or block.state_layers < shape.linear_layers):
                state = self.prefix.take_state(block, shape.linear_layers)
        return replace(piece, saved_rows=tuple(saved), saved_state=state)

    def _note_generated(self, request: Request) -> None:
        """Hand what a request without drops has generated to the prefix cache, as far as its tokens are known."""
        shape, page = request.shape.prefix, self.config.page_size
        if request.state is not RequestState.RUNNING or shape.rows_of is not None or shape.linear_layers:
            return
        fed = min(request.dispatched - 1, len(request.generated))
        tokens = np.concatenate([request.prompt, np.asarray(request.generated[:fed], np.int32)])
        for start in range(request.noted_pages * page, len(tokens), page):
            if request.last_block is not None:
                self._note_page(request, tokens[start : start + page])

    def _note_page(self, request: Request, tokens: Int32[np.ndarray, " tokens"]) -> None:
        """Note a request's next page of tokens, and hand its pages over where the prefix cache lacks them."""
        assert self.prefix is not None and request.last_block is not None and request.pages is not None
        layers = request.shape.prefix.layers
        block = request.last_block = self.prefix.child(request.last_block, tokens)
        if block is not None:
            if self.prefix.wants_pages(block, layers):
                self.prefix.give_pages(block, request.pages.hand_over(request.noted_pages, layers))
                request.blocks.append(block)
            request.noted_pages += 1

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        self._give_back(request)
        request.preemptions += 1
        plan.preempted.append(request)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self._insert(self.waiting, request)

    def _give_back(self, request: Request) -> None:
        assert request.pages is not None
        self.admitted.remove(request)
        if request.pack is not None:
            request.pack.members.remove(request)
            request.pack, request.chunk = None, 0
        if self.prefix is not None:
            self._note_generated(request)
        request.pages.free()
        request.pages = None
        if self.prefix is not None:
            for block in reversed(request.blocks):
                self.prefix.release(block, request.shape.prefix.layers)
            request.reused, request.blocks, request.last_block = PrefixMatch(), [], None
        self.pages.release(request.reserved)
        request.reserved = 0
        self.slots.free(request.slot)
        request.slot = -1

    def _make_room(self, pages: int) -> bool:
        """Whether so many pages are available, after giving up what is only kept in case it is of use."""
        return pages <= self.pages.available_pages or (self.prefix is not None and self.prefix.make_room(pages))

    def _worst_pages(self, tokens: int) -> int:
        return self.num_layers * pages_of(tokens, self.config.page_size)

    @staticmethod
    def _insert(queue: list[Request], request: Request) -> None:
        place = sum(other.rank < request.rank for other in queue)
        queue.insert(place, request)


def kept_fraction(request: Request) -> float:
    """Prompt tokens in a request's attention caches, over those of a dense prefill."""
    lengths = _layer_lengths(request)
    return sum(lengths) / (len(lengths) * len(request.prompt)) if lengths else 1.0


def prompt_pages(request: Request, page_size: int) -> int:
    """Pages of a prompt's tokens in a request's attention caches."""
    return sum(pages_of(length, page_size) for length in _layer_lengths(request))


def _layer_lengths(request: Request) -> list[int]:
    pairs: Iterable[tuple[tuple[int, ...], int]] = zip(request.shape.segments, request.segment_lengths, strict=False)
    return [length for layers, length in pairs for _ in layers]
