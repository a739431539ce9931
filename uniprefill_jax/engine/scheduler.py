"""Who gets pages, slots and the next step's token budget. Host bookkeeping only: nothing here touches the device.

First come first served within a priority. A request is admitted when a slot is free and its worst case fits: every
layer keeps the whole prompt. What a drop leaves over goes back at once. Generated tokens take pages as they grow; where
none is left, the admitted request that ranks last gives all of its own back and waits to be computed again. The request
that ranks first is never preempted and fits the pool alone, so every step makes progress.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from uniprefill_jax.cache.pages import CacheError, PageAllocator, SlotAllocator
from uniprefill_jax.cache.tables import RequestPages, pages_of
from uniprefill_jax.config import EngineConfig
from uniprefill_jax.engine.requests import Request, RequestState
from uniprefill_jax.errors import InputError


@dataclass(frozen=True)
class Unit:
    """One piece of prefill: rows [start, start + count) of a request's stage."""

    request: Request
    stage: int
    start: int
    count: int
    ends_stage: bool
    ends_prefill: bool


@dataclass(frozen=True)
class DecodeRow:
    """One request's part of a decode step: the pages added for it as (layer, column, id)."""

    request: Request
    new_pages: list[tuple[int, int, int]]


@dataclass
class StepPlan:
    """What one step does."""

    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)


class Scheduler:
    """Requests by state, and the accounts of pages and slots.

    Attributes:
        budget: most prompt tokens of one step.
    """

    def __init__(self, config: EngineConfig, num_attention_layers: int):
        self.config = config
        self.budget = config.prefill_chunk
        self.num_layers = num_attention_layers
        self.pages = PageAllocator(config.pool_pages)
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
        self._plan_decode(plan)
        self._admit(plan)
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
            while needed > self.pages.available_pages and request.admitted:
                self._preempt(self.admitted[-1], plan)
            if request.admitted:
                plan.decode.append(DecodeRow(request, request.pages.append_token()))
                request.dispatched += 1

    def _admit(self, plan: StepPlan) -> None:
        while self.waiting and self.slots.free_slots:
            request = self.waiting[0]
            # One that was preempted will need room for its own tokens again: do not let it in to be thrown out.
            if self._worst_pages(len(request.prompt) + len(request.generated)) > self.pages.available_pages:
                return
            self.waiting.pop(0)
            request.state = RequestState.PREFILLING
            request.slot = self.slots.allocate()
            request.pages = RequestPages(self.pages, self.config.page_size, self.num_layers)
            request.reserved = self._worst_pages(len(request.prompt))
            self.pages.reserve(request.reserved)
            request.stage = request.row = request.dispatched = 0
            request.rows = len(request.prompt)
            request.awaits_drop = False
            request.segment_lengths = []
            self._insert(self.admitted, request)
            self._open_segment(request, len(request.prompt))
            plan.admitted.append(request)

    def _plan_prefill(self, plan: StepPlan) -> None:
        budget = self.budget
        for request in self.in_state(RequestState.PREFILLING):
            while budget and request.state is RequestState.PREFILLING and not request.awaits_drop:
                unit = self._next_unit(request, budget)
                budget -= unit.count
                plan.units.append(unit)

    def _next_unit(self, request: Request, budget: int) -> Unit:
        stages = request.shape.stages
        count = min(budget, request.rows - request.row)
        ends_stage = request.row + count == request.rows
        ends_prefill = ends_stage and request.stage + 1 == len(stages)
        unit = Unit(request, request.stage, request.row, count, ends_stage, ends_prefill)
        request.row += count
        if ends_prefill:
            request.state = RequestState.RUNNING
            request.dispatched = 1
        elif ends_stage and stages[request.stage].drops:
            request.awaits_drop = True
        elif ends_stage:
            # Kept rows have gone back among all rows.
            request.stage += 1
            request.row, request.rows = 0, len(request.prompt)
        return unit

    def _open_segment(self, request: Request, length: int) -> None:
        """Take the pages of the next segment out of the promise, and shrink it to what may still be needed."""
        assert request.pages is not None
        number = len(request.segment_lengths)
        to_come = sum(len(layers) for layers in request.shape.segments[number + 1 :])
        longest = len(request.prompt) if request.shape.carries else length
        self.pages.release(request.reserved)
        request.pages.open_segment(request.shape.segments[number], length)
        request.reserved = to_come * pages_of(longest, self.config.page_size)
        self.pages.reserve(request.reserved)
        request.segment_lengths.append(length)

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
        request.pages.free()
        request.pages = None
        self.pages.release(request.reserved)
        request.reserved = 0
        self.slots.free(request.slot)
        request.slot = -1

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


def _layer_lengths(request: Request) -> list[int]:
    pairs: Iterable[tuple[tuple[int, ...], int]] = zip(request.shape.segments, request.segment_lengths, strict=False)
    return [length for layers, length in pairs for _ in layers]
