"""An engine in every process, all given the same calls in the same order: the others repeat what process 0 does.

What depends on a clock or on the network (arrivals, cancellations, when to step) is decided by process 0 alone. Its
calls are collected and announced with the next step, before it begins; a step then exchanges what it does on any mesh.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from uniprefill_jax.config import EngineConfig, SamplingConfig, UniPrefillConfig
from uniprefill_jax.engine.engine import Engine
from uniprefill_jax.engine.requests import Event, PrefillReport
from uniprefill_jax.llm import LLM
from uniprefill_jax.parallel.announcements import Announcements


class _Call(NamedTuple):
    """A method of the engine, and what it was given."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = {}


class LeadingEngine(Engine):
    """The engine of process 0. To be used as any engine, while every other process runs `follow`."""

    def __init__(self, llm: LLM, config: EngineConfig | None = None):
        """Allocate the pools, and let the others do so."""
        config = config or EngineConfig()
        self._announcements = Announcements()
        self._calls: list[_Call] = []
        # Everything comes from process 0, so that no two can differ. Whoever could send a pickle here runs the same
        # program already.
        self._announcements.send(pickle.dumps(config))
        super().__init__(llm, config)

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
        """See `Engine.submit`; what is refused here the others never hear of."""
        options = {"priority": priority, "report": report, "logprobs": logprobs}
        number = super().submit(prompt, config, sampling, **options)
        self._calls.append(_Call("submit", (self._requests[number].prompt, config, sampling), options))
        return number

    def cancel(self, request_id: int) -> bool:
        """See `Engine.cancel`."""
        self._calls.append(_Call("cancel", (request_id,)))
        return super().cancel(request_id)

    def take_report(self, request_id: int) -> PrefillReport:
        """See `Engine.take_report`."""
        report = super().take_report(request_id)
        self._calls.append(_Call("take_report", (request_id,)))
        return report

    def forget_prefixes(self) -> None:
        """See `Engine.forget_prefixes`."""
        self._calls.append(_Call("forget_prefixes"))
        super().forget_prefixes()

    def limit_step(self, tokens: int | None = None) -> None:
        """See `Engine.limit_step`."""
        self._calls.append(_Call("limit_step", (tokens,)))
        super().limit_step(tokens)

    def step(self) -> list[Event]:
        """See `Engine.step`."""
        self._announce("step")
        return super().step()

    def dismiss(self) -> None:
        """Let the others go; the engine cannot be used any more."""
        self._announce("dismiss")

    def _announce(self, last: str) -> None:
        calls, self._calls = [*self._calls, _Call(last)], []
        self._announcements.send(pickle.dumps(calls))


@contextmanager
def leading(llm: LLM, config: EngineConfig) -> Iterator[Engine]:
    """The engine of process 0 while the block lasts; the others follow, and are let go at its end, however it ends."""
    engine = LeadingEngine(llm, config)
    try:
        yield engine
    finally:
        engine.dismiss()


def follow(llm: LLM) -> None:
    """Be one of the other processes: do what process 0 does, until it lets this one go.

    Raises JaxRuntimeError where process 0 has died, unless the runtime ends this process first.
    """
    announcements = Announcements()
    engine = Engine(llm, pickle.loads(announcements.receive()))
    while True:
        for call in pickle.loads(announcements.receive()):
            if call.method == "dismiss":
                return
            getattr(engine, call.method)(*call.arguments, **call.options)
