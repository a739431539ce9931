"""The engine on a thread of its own. Others hand in jobs and cancellations; what comes of a job is delivered to it.

Nothing but this thread touches the engine. Commands lie in a queue that is emptied before every step, so a cancelled
job has freed its pages before the next step begins. When the engine raises, it is not used again: every job is told,
and later ones are refused.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from uniprefill_jax.config import SamplingConfig, UniPrefillConfig
from uniprefill_jax.engine.engine import Engine, EngineStats
from uniprefill_jax.engine.requests import Event
from uniprefill_jax.errors import UniPrefillError

_logger = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The engine has failed or was stopped; nothing more will come of any job."""


@dataclass(frozen=True)
class JobSpec:
    """One sequence to generate; see `Engine.submit`."""

    prompt: tuple[int, ...]
    config: UniPrefillConfig
    sampling: SamplingConfig
    priority: int = 0
    logprobs: int | None = None


Update = Event | UniPrefillError | EngineDead


@dataclass(eq=False)
class Job:
    """A sequence on its way.

    Attributes:
        spec: what to generate.
        deliver: called on the engine's thread with everything that becomes known; the last call is a "finished" event
            or an error. It must neither block nor raise.
        arrived, first_token_at, last_token_at: `time.monotonic` seconds; 0 where it has not happened.
        generated: tokens so far.
    """

    spec: JobSpec
    deliver: Callable[[Update], None]
    arrived: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    generated: int = 0


class Observer(Protocol):
    """Who wants to know what happens to jobs (metrics). Called on the engine's thread."""

    def token(self, job: Job, seconds: float) -> None:
        """A job got a token, `seconds` after the one before, or after its arrival for the first."""

    def finished(self, job: Job, event: Event) -> None:
        """A job ended by itself."""

    def cancelled(self, job: Job) -> None:
        """A job was cancelled before its end."""

    def preempted(self, job: Job) -> None:
        """A job lost its pages and will be computed again."""


@dataclass(frozen=True)
class _Cancel:
    job: Job


class _Stop:
    pass


class EngineThread:
    """Runs an engine until it is stopped or fails. All methods may be called from any thread."""

    def __init__(self, engine: Engine, observer: Observer):
        """Take over the engine; nobody else may use it any more."""
        self.stats: EngineStats = engine.stats()
        self.error: BaseException | None = None
        self._engine = engine
        self._observer = observer
        self._commands: SimpleQueue[Job | _Cancel | _Stop] = SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[Job, int] = {}
        self._lock = threading.Lock()  # nothing is queued once the thread has looked for the last time
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether jobs are taken."""
        return not self._closed

    @property
    def waiting(self) -> int:
        """Jobs that hold nothing yet: those that the engine lets wait and those that it has not seen."""
        return self.stats.waiting + self._commands.qsize()

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Hand in a job; EngineDead where nothing would come of it."""
        self._put(job)

    def cancel(self, job: Job) -> None:
        """End a job before the next step; nothing happens where it has ended already."""
        try:
            self._put(_Cancel(job))
        except EngineDead:
            return

    def stop(self) -> None:
        """Finish the step in hand and end the thread; jobs that have not ended are told so. Waits for the thread."""
        try:
            self._put(_Stop())
        except EngineDead:
            pass
        self._thread.join()

    def _put(self, command: Job | _Cancel | _Stop) -> None:
        with self._lock:
            if self._closed:
                raise EngineDead("the engine has failed or was stopped")
            self._commands.put(command)

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work:
                    self._publish(self._engine.step())
                self.stats = self._engine.stats()
        except BaseException as error:
            _logger.exception("the engine has failed")
            self.error = error
        finally:
            self._close()

    def _obey(self) -> bool:
        """Take all commands there are, and wait for one where there is nothing else to do; False to stop."""
        wait = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except Empty:
                return True
            wait = False
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Cancel):
                self._cancel(command.job)
            else:
                self._admit(command)

    def _admit(self, job: Job) -> None:
        spec = job.spec
        try:
            number = self._engine.submit(
                spec.prompt, spec.config, spec.sampling, priority=spec.priority, logprobs=spec.logprobs
            )
        except UniPrefillError as error:
            job.deliver(error)
            return
        self._jobs[number], self._numbers[job] = job, number

    def _cancel(self, job: Job) -> None:
        number = self._numbers.pop(job, None)
        if number is None:
            return
        del self._jobs[number]
        self._engine.cancel(number)
        self._observer.cancelled(job)

    def _publish(self, events: list[Event]) -> None:
        now = time.monotonic()
        for event in events:
            job = self._jobs[event.request_id]
            if event.kind == "token":
                seconds = now - (job.last_token_at or job.arrived)
                job.first_token_at = job.first_token_at or now
                job.last_token_at = now
                job.generated += 1
                self._observer.token(job, seconds)
            elif event.kind == "preempted":
                self._observer.preempted(job)
            else:
                del self._jobs[event.request_id], self._numbers[job]
                self._observer.finished(job, event)
            job.deliver(event)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
        left = list(self._jobs.values())
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Job):
                left.append(command)
        for job in left:
            job.deliver(EngineDead("the engine has failed or was stopped"))
        self._jobs.clear()
        self._numbers.clear()
