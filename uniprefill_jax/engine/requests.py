"""Requests: what was asked, how far it has come, and what it reports."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from uniprefill_jax.cache.prefix import CachedBlock, PrefixMatch, PrefixShape
from uniprefill_jax.cache.tables import RequestPages
from uniprefill_jax.config import SamplingConfig, UniPrefillConfig


class RequestState(Enum):
    """Where a request is. A preempted one waits again; finished and cancelled ones hold nothing."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class PartPrice:
    """What a row of a part of a stage costs, in rows of a whole part that see nothing.

    Attributes:
        row: whatever it sees.
        seen: for every window (None: none) of the part's layers, what each row that it sees costs.
    """

    row: float = 1.0
    seen: tuple[tuple[int | None, float], ...] = ()

    def of(self, rows_before: int) -> float:
        """The price of a row that has so many before it."""
        return self.row + sum(
            price * (rows_before if window is None else min(rows_before, window)) for window, price in self.seen
        )


@dataclass(frozen=True)
class StageRows:
    """What the scheduler needs to know of a stage: its rows, whether it ends in a drop, and its parts."""

    rows: Literal["all", "kept"]
    drops: bool
    parts: tuple[PartPrice, ...] = (PartPrice(),)


@dataclass(frozen=True)
class PrefillShape:
    """What the scheduler needs to know of a request's prefill.

    Attributes:
        stages: its stages in order.
        segments: for every segment, its attention layers.
        carries: whether every drop starts from all tokens again.
        prefix: what of it depends on the tokens alone.
        kind: requests that agree in it run the same programs, and their rows may share a chunk.
    """

    stages: tuple[StageRows, ...]
    segments: tuple[tuple[int, ...], ...]
    carries: bool
    prefix: PrefixShape
    kind: Hashable = None


@dataclass(eq=False)
class Pack:
    """A chunk that is on its way through a stage: rows of one or more requests, which stay together to its end.

    Attributes:
        stage: the stage.
        part: the next part of it.
        members: its requests, but for those that have left since.
    """

    stage: int
    part: int
    members: "list[Request]"


@dataclass(eq=False)
class Request:
    """One request, from submission to its end.

    Attributes:
        id: number that `submit` gave out.
        prompt: token ids.
        config, sampling: as submitted.
        shape: its prefill, for the scheduler.
        limit: most tokens it can generate.
        logprobs: likeliest alternatives to report beside every token; None reports nothing.
        rank: (priority, order of arrival); lower goes first.
        state: see `RequestState`.
        slot: row of the decode batch while admitted.
        pages: pages while admitted.
        reserved: pages promised for segments not yet open.
        stage, row, rows: the stage in hand, its next row, and how many it has.
        pack, chunk: the chunk in hand, and how many of its rows are this request's; None and 0 where none is begun.
        awaits_drop: whether a drop was dispatched whose outcome the host has not read.
        segment_lengths: tokens of every segment so far; the first is the prompt's length.
        reused: what was found of the prompt's beginning when it was admitted.
        blocks: blocks of the prefix cache whose pages it reads.
        last_block: where its next block goes; None once its tokens are no longer noted.
        noted_pages: how many pages of its tokens were noted in the prefix cache, or found there.
        generated: tokens known to the host; after a preemption they are fed again, not drawn again.
        dispatched: tokens whose computation was started since admission.
        finish_reason: "stop", "length" or "cancelled" once it has ended.
        preemptions: how often it was preempted.
    """

    id: int
    prompt: Int32[np.ndarray, " prompt"]
    config: UniPrefillConfig
    sampling: SamplingConfig
    shape: PrefillShape
    limit: int
    rank: tuple[int, int]
    logprobs: int | None = None
    state: RequestState = RequestState.WAITING
    slot: int = -1
    pages: RequestPages | None = None
    reserved: int = 0
    stage: int = 0
    row: int = 0
    rows: int = 0
    pack: Pack | None = None
    chunk: int = 0
    awaits_drop: bool = False
    segment_lengths: list[int] = field(default_factory=list)
    reused: PrefixMatch = PrefixMatch()
    blocks: list[CachedBlock] = field(default_factory=list)
    last_block: CachedBlock | None = None
    noted_pages: int = 0
    generated: list[int] = field(default_factory=list)
    dispatched: int = 0
    finish_reason: str = ""
    preemptions: int = 0

    @property
    def admitted(self) -> bool:
        """Whether it holds a slot and pages."""
        return self.state in (RequestState.PREFILLING, RequestState.RUNNING)

    @property
    def ended(self) -> bool:
        """Whether nothing will come of it any more."""
        return self.state in (RequestState.FINISHED, RequestState.CANCELLED)


@dataclass(frozen=True)
class PrefillReport:
    """What a finished prefill decided; kept for requests submitted with `report=True`.

    Attributes:
        logits: float32 [vocab], of the last prompt token.
        kept_positions: for every drop layer, the original positions that stayed, rising.
        cut_margin: for every drop layer, the smallest distance of a cumulative mass to top_p.
    """

    logits: Float[np.ndarray, " vocab"]
    kept_positions: dict[int, Int32[np.ndarray, " kept"]]
    cut_margin: dict[int, float]


class Event(NamedTuple):
    """Something that became known in a step.

    Attributes:
        request_id: whose.
        kind: "token" (one more), "finished" (its last word), or "preempted" (it waits again; nothing is lost).
        token: the token, of a "token" event.
        text: text that became certain with it, of a "token" event; empty where there is no tokenizer.
        finish_reason: "stop" or "length", of a "finished" event.
        kept_fraction: of a "finished" event, prompt tokens in the attention caches over those of a dense prefill.
        prompt_pages: of a "finished" event, pages that the prompt took after its prefill, shared ones among them.
        reused_tokens: of a "finished" event, prompt tokens that were found in the prefix cache.
        logprob: log-probability of the token, of a "token" event of a request that asked for it.
        alternatives: the likeliest tokens in its place and their log-probabilities, falling; as many as were asked for.
    """

    request_id: int
    kind: Literal["token", "finished", "preempted"]
    token: int = -1
    text: str = ""
    finish_reason: str = ""
    kept_fraction: float = 1.0
    prompt_pages: int = 0
    reused_tokens: int = 0
    logprob: float = float("nan")
    alternatives: tuple[tuple[int, float], ...] = ()
