"""The choices of one request while the engine works on them: what came of each so far, and their end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from uniprefill_jax.engine.requests import Event
from uniprefill_jax.serve.engine_thread import EngineDead, EngineThread, Job, JobSpec, Update
from uniprefill_jax.serve.errors import ApiError, engine_failed
from uniprefill_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenReport:
    """One token of an answer with its log-probability, and those that were likely in its place."""

    token_id: int
    content: bytes
    logprob: float
    alternatives: tuple[tuple[bytes, float], ...]


@dataclass
class Choice:
    """One sequence of an answer.

    Attributes:
        index: its number in the answer.
        text: what is certain so far.
        tokens: how many were generated.
        reports: log-probabilities, where they were asked for; the token that ended the text is not among them.
        finish_reason: None until it has ended.
        kept_fraction, reused_tokens: of a finished one, see `Event`.
    """

    index: int
    text: str = ""
    tokens: int = 0
    reports: list[TokenReport] = field(default_factory=list)
    finish_reason: str | None = None
    kept_fraction: float = 1.0
    reused_tokens: int = 0


@dataclass(frozen=True)
class Growth:
    """What one event added to a choice; the last growth of a choice sees its `finish_reason`."""

    choice: Choice
    text: str
    reports: list[TokenReport]


class Generation:
    """Hands jobs to the engine when it is entered, and cancels what has not ended when it is left."""

    def __init__(self, engine: EngineThread, specs: Sequence[JobSpec], tokenizer: Tokenizer | None):
        self.choices = [Choice(index) for index in range(len(specs))]
        self._engine = engine
        self._specs = specs
        self._tokenizer = tokenizer
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._jobs: list[Job] = []

    async def __aenter__(self) -> Self:
        """Submit the jobs; ApiError 500 where the engine is dead."""
        loop = asyncio.get_running_loop()
        for index, spec in enumerate(self._specs):
            job = Job(spec, deliver=partial(_deliver, loop, self._updates, index))
            try:
                self._engine.submit(job)
            except EngineDead:
                raise engine_failed() from None
            self._jobs.append(job)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel the jobs that have not ended."""
        for choice, job in zip(self.choices, self._jobs, strict=False):
            if choice.finish_reason is None:
                self._engine.cancel(job)

    async def growths(self) -> AsyncIterator[Growth]:
        """Every choice's growth as it comes, until all have ended.

        Raises ApiError: 400 where the engine refuses a prompt, 500 where it dies.
        """
        left = len(self.choices)
        while left:
            index, update = await self._updates.get()
            if isinstance(update, EngineDead):
                raise engine_failed()
            if not isinstance(update, Event):
                raise ApiError(400, str(update), code="invalid_value")
            choice = self.choices[index]
            if update.kind == "finished":
                left -= 1
                choice.finish_reason, choice.kept_fraction = update.finish_reason, update.kept_fraction
                choice.reused_tokens = update.reused_tokens
                yield Growth(choice, "", [])
            elif update.kind == "token":
                reports = self._reports(self._specs[index], update)
                choice.tokens += 1
                choice.text += update.text
                choice.reports += reports
                yield Growth(choice, update.text, reports)

    def _reports(self, spec: JobSpec, event: Event) -> list[TokenReport]:
        if spec.logprobs is None:
            return []
        if self._tokenizer is None:
            alternatives = tuple((str(token).encode(), value) for token, value in event.alternatives)
            return [TokenReport(event.token, str(event.token).encode(), event.logprob, alternatives)]
        if event.token in self._tokenizer.eos_token_ids and not spec.sampling.ignore_eos:
            return []
        alternatives = tuple((self._tokenizer.token_bytes(token), value) for token, value in event.alternatives)
        return [TokenReport(event.token, self._tokenizer.token_bytes(event.token), event.logprob, alternatives)]


def _deliver(
    loop: asyncio.AbstractEventLoop, updates: asyncio.Queue[tuple[int, Update]], index: int, update: Update
) -> None:
    loop.call_soon_threadsafe(updates.put_nowait, (index, update))
