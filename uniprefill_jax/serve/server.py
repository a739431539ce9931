"""Runs the application: in the foreground until a signal, or on a thread of its own for tests and benchmarks."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from uniprefill_jax.engine.engine import Engine
from uniprefill_jax.errors import InputError
from uniprefill_jax.serve.app import build_app
from uniprefill_jax.serve.engine_thread import EngineThread
from uniprefill_jax.serve.settings import ServerSettings

_logger = logging.getLogger(__name__)
_BACKLOG = 2048
# Longer than clients keep idle connections: one that is closed just as it is used again is an error to them.
_KEEP_ALIVE_SECONDS = 75


def serve(engine: Engine, settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT; then take no more requests and let running ones finish (`drain_timeout`).

    Raises InputError where the address cannot be used.
    """
    listening = _listen(settings)
    server, _ = _build(engine, settings)
    fields = {"url": _url(listening), "model": settings.model_name}
    _logger.info("listening", extra={"fields": fields})
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn hands the signal on once everything is finished
        return


def check_address(settings: ServerSettings) -> None:
    """Raise InputError where `serve` could not listen, before minutes of work go into a model."""
    _listen(settings).close()


@dataclass(frozen=True)
class RunningServer:
    """A server on another thread.

    Attributes:
        url: where it answers.
        engine: its engine's thread.
    """

    url: str
    engine: EngineThread
    _server: uvicorn.Server
    _thread: threading.Thread

    def begin_shutdown(self) -> None:
        """Take no more requests; running ones finish."""
        self._server.should_exit = True

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within so many seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


@contextmanager
def running_server(engine: Engine, settings: ServerSettings) -> Iterator[RunningServer]:
    """A server on a thread of its own, drained at the end."""
    listening = _listen(settings)
    server, engine_thread = _build(engine, settings)
    thread = threading.Thread(target=server.run, args=([listening],), name="server", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server ended before it had begun; see its log")
            time.sleep(0.01)
        yield RunningServer(_url(listening), engine_thread, server, thread)
    finally:
        server.should_exit = True
        thread.join()


def _build(engine: Engine, settings: ServerSettings) -> tuple[uvicorn.Server, EngineThread]:
    app = build_app(engine, settings)
    config = uvicorn.Config(
        app,
        # The one HTTP parser that is always there: it goes on reading (and dropping) a body that was refused, so that
        # a client still sending sees the answer.
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout)),
    )
    return uvicorn.Server(config), app.state.engine_thread


def _listen(settings: ServerSettings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {settings.host}:{settings.port}: {error}; use another address") from None


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
