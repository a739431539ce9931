"""The engine: submit requests, step, read events. Prefill goes in chunks while everything that runs goes on decoding.

One step reads the outcome of the drops of the step before (an integer each), plans, dispatches one decode step and the
prefill units that fit its token budget, and only then reads the tokens of the step before: the device never waits for
the host to look at a token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from uniprefill_jax.cache.pools import attention_layers
from uniprefill_jax.config import EngineConfig, SamplingConfig, UniPrefillConfig
from uniprefill_jax.engine.executor import Executor
from uniprefill_jax.engine.requests import (
    Event,
    PartPrice,
    PrefillReport,
    PrefillShape,
    Request,
    RequestState,
    StageRows,
)
from uniprefill_jax.engine.scheduler import Scheduler, kept_fraction, prompt_pages
from uniprefill_jax.engine.stages import Stage, part_price, prefill_stages, prefix_shape, segment_layers, stage_parts
from uniprefill_jax.errors import ConfigError, InputError
from uniprefill_jax.llm import LLM, GrowingText
from uniprefill_jax.sampling import MAX_LOGPROBS, Drawn
from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers


@dataclass(frozen=True)
class EngineStats:
    """Where an engine stands.

    Attributes:
        waiting, prefilling, running: requests in these states.
        finished, cancelled, preemptions: how many there were so far.
        pages, pages_in_use, pages_reserved: of the pool; reserved ones are promised to prefills in progress.
        pages_cached: kept for prefix reuse alone; free for whoever needs them.
        prefix_queried_tokens, prefix_hit_tokens: prompt tokens looked up for reuse so far, and those that were found.
        slots_in_use: admitted requests.
        programs: compiled programs so far.
    """

    waiting: int
    prefilling: int
    running: int
    finished: int
    cancelled: int
    preemptions: int
    pages: int
    pages_in_use: int
    pages_reserved: int
    pages_cached: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    slots_in_use: int
    programs: int


@dataclass(frozen=True)
class _Pending:
    """Tokens on their way: the device's arrays, and for each entry that matters the request and the token's number."""

    drawn: Drawn
    entries: list[tuple[int, Request, int]]


class Engine:
    """Continuous batching over one model, on one device or on a mesh that is one replica.

    Not thread-safe: one thread submits, steps and cancels. On a mesh of several processes each of them runs an engine,
    and all have to be given the same calls in the same order (`leading` and `follow` see to it).
    """

    def __init__(self, llm: LLM, config: EngineConfig | None = None):
        """Allocate the pools.

        Raises ConfigError for a model on a mesh of several data replicas.
        """
        if len(llm.replicas) > 1:
            raise ConfigError(
                f"the model lies on a mesh of {len(llm.replicas)} data replicas and an engine runs one; load it with "
                "data_parallel_size=1 in one process per replica, behind a load balancer"
            )
        self.llm = llm
        self.config = config or EngineConfig()
        self.max_length = min(self.config.max_length, llm.config.max_position)
        self.executor = Executor(llm, self.config, self.max_length)
        self.scheduler = Scheduler(
            self.config, len(attention_layers(llm.config)), self.executor.identity, self.executor.row_pages
        )
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, GrowingText] = {}
        self._wants_report: set[int] = set()
        self._reports: dict[int, PrefillReport] = {}
        self._pending: list[_Pending] = []
        self._submitted = 0
        self._counts: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def submit(
        self,
        prompt: Sequence[int],
        config: UniPrefillConfig | None = None,
        sampling: SamplingConfig | None = None,
        *,
        priority: int = 0,
        report: bool = False,
        logprobs: int | None = None,
    ) -> int:
        """Queue a prompt of token ids; its number, by which events name it.

        Args:
            prompt: token ids.
            config: how the prompt is shortened.
            sampling: how tokens are drawn, and how many at most.
            priority: lower goes first; equal ones in order of submission.
            report: keep what the prefill decided for `take_report`.
            logprobs: put the log-probability of every token into its event, with this many likeliest alternatives.

        Raises InputError for a prompt that the model or the pool cannot take, ConfigError for impossible drop layers
        or more than `MAX_LOGPROBS` alternatives.
        """
        config, sampling = config or self.llm.default_config, sampling or SamplingConfig()
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"logprobs is {logprobs}; use 0 to {MAX_LOGPROBS} alternatives, or None")
        tokens = self.llm.checked_tokens(prompt)
        if len(tokens) > self.max_length:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, the engine takes at most {self.max_length}; shorten it or raise "
                "max_length"
            )
        config = config.for_length(len(tokens))
        drop_layers = resolve_drop_layers(config, self.llm.config)
        stages = prefill_stages(self.llm.config, config, drop_layers)
        # The token after the last position can be drawn, but not fed back.
        limit = min(sampling.max_tokens, self.max_length - len(tokens) + 1)
        text = GrowingText(self.llm.tokenizer, sampling, limit)
        request = Request(
            id=self._submitted,
            prompt=np.asarray(tokens, np.int32),
            config=config,
            sampling=sampling,
            shape=PrefillShape(
                stages=tuple(StageRows(stage.rows, stage.drops, self._prices(stage)) for stage in stages),
                segments=segment_layers(self.llm.config, config, drop_layers),
                carries=config.dropped_tokens == "carry",
                prefix=prefix_shape(self.llm.config, config, drop_layers),
                kind=(drop_layers, config.dropped_tokens, config.sliding_window),
            ),
            limit=limit,
            rank=(priority, self._submitted),
            logprobs=logprobs,
        )
        self.scheduler.submit(request)
        self._submitted += 1
        self._requests[request.id] = request
        self._texts[request.id] = text
        if report:
            self._wants_report.add(request.id)
        return request.id

    def most_tokens(self, prompt_length: int) -> int:
        """Most tokens that a request with such a prompt can be given; below 1 where the prompt itself is too long."""
        # The last token is drawn, but not fed back: it needs no room.
        return min(self.max_length, self.scheduler.longest_request()) - prompt_length + 1

    def step(self) -> list[Event]:
        """Do one step's worth of work; what became known in it."""
        self._read_drops()
        plan = self.scheduler.schedule()
        events = []
        for request in plan.preempted:
            self.executor.forget(request)
            self._counts["preemptions"] += 1
            events.append(Event(request.id, "preempted"))
        before, self._pending = self._pending, []
        if plan.decode:
            entries = [(row.request.slot, row.request, row.request.dispatched - 1) for row in plan.decode]
            self._pending.append(_Pending(self.executor.decode(plan.decode), entries))
        for unit in plan.units:
            for request, first in self.executor.run(unit):
                self._pending.append(_Pending(first, [(0, request, 0)]))
                if request.id in self._wants_report:
                    self._reports[request.id] = self.executor.report(request)
                self.executor.forget(request)
        for pending in before:
            events += self._read(pending)
        return events

    def cancel(self, request_id: int) -> bool:
        """End a request wherever it is, and free all that it holds; False where it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, "cancelled")
        self._reports.pop(request_id, None)
        return True

    def take_report(self, request_id: int) -> PrefillReport:
        """What the prefill of a request submitted with `report=True` decided; InputError where there is none (yet)."""
        if request_id not in self._reports:
            raise InputError(f"there is no report of request {request_id}: not asked for, not prefilled, or taken")
        return self._reports.pop(request_id)

    def limit_step(self, tokens: int | None = None) -> None:
        """Most prompt tokens of a step from now on; None: as configured."""
        self.scheduler.budget = self.config.prefill_chunk if tokens is None else tokens

    def forget_prefixes(self) -> None:
        """Keep nothing of the prompts so far for reuse."""
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.clear()

    def stats(self) -> EngineStats:
        """Where the engine stands."""
        pages, prefix = self.scheduler.pages, self.scheduler.prefix
        cached = 0 if prefix is None else prefix.evictable_pages
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            prefilling=len(self.scheduler.in_state(RequestState.PREFILLING)),
            running=len(self.scheduler.in_state(RequestState.RUNNING)),
            finished=self._counts["finished"],
            cancelled=self._counts["cancelled"],
            preemptions=self._counts["preemptions"],
            pages=pages.num_pages,
            pages_in_use=pages.used_pages - cached,
            pages_reserved=pages.reserved_pages,
            pages_cached=cached,
            prefix_queried_tokens=self.scheduler.queried_tokens,
            prefix_hit_tokens=self.scheduler.hit_tokens,
            slots_in_use=self.config.max_running - self.scheduler.slots.free_slots,
            programs=self.executor.compiled,
        )

    def _read_drops(self) -> None:
        """Go on with requests that await a drop; only where there is nothing else to do the device is waited for."""
        admitted = self.scheduler.admitted
        awaiting = [request for request in admitted if request.awaits_drop]
        # Processes of one mesh have to take the same decisions, and their devices are not ready at the same time.
        may_wait = len(awaiting) == len(admitted) or jax.process_count() > 1
        for request in awaiting:
            if may_wait or self.executor.drop_is_ready(request):
                self.scheduler.drop_read(request, self.executor.read_drop(request))
                self.executor.next_segment(request)

    def _prices(self, stage: Stage) -> tuple[PartPrice, ...]:
        return tuple(part_price(self.llm.config, part) for part in stage_parts(self.llm.config, stage))

    def _read(self, pending: _Pending) -> list[Event]:
        tokens = np.asarray(pending.drawn.tokens).tolist()
        logprobs = None if pending.drawn.logprobs is None else jax.device_get(pending.drawn.logprobs)
        events = []
        for place, request, number in pending.entries:
            # It may have ended since, or be computing tokens again that were already handed out.
            if request.ended or number < len(request.generated):
                continue
            token, text = tokens[place], self._texts[request.id]
            request.generated.append(token)
            event = Event(request.id, "token", token, text.push(token))
            if logprobs is not None and request.logprobs is not None:
                likeliest = logprobs.likeliest[place, : request.logprobs].tolist()
                values = logprobs.values[place, : request.logprobs].tolist()
                alternatives = tuple(zip(likeliest, values, strict=True))
                event = event._replace(logprob=float(logprobs.drawn[place]), alternatives=alternatives)
            events.append(event)
            if text.ended:
                fraction, reused = kept_fraction(request), request.reused.tokens
                pages = prompt_pages(request, self.config.page_size)
                self._end(request, text.finish_reason)
                events.append(
                    Event(
                        request.id,
                        "finished",
                        finish_reason=request.finish_reason,
                        kept_fraction=fraction,
                        prompt_pages=pages,
                        reused_tokens=reused,
                    )
                )
        return events

    def _end(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        self.executor.forget(request)
        self._counts["cancelled" if reason == "cancelled" else "finished"] += 1
        del self._requests[request.id], self._texts[request.id]
        self._wants_report.discard(request.id)
