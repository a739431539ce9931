"""`/profile/start` and `/profile/stop`: traces of what the device does while requests are served."""

import threading
from datetime import UTC, datetime
from pathlib import Path

import jax

from uniprefill_jax.serve.errors import ApiError


class Profiler:
    """At most one trace at a time, written below one folder (TensorBoard and Perfetto read it)."""

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._running: Path | None = None
        self._lock = threading.Lock()

    def start(self) -> Path:
        """Begin a trace; its folder. ApiError 404 where profiling is off, 409 where a trace is running."""
        with self._lock:
            if self._folder is None:
                raise ApiError(404, "profiling is off; start the server with --profile-folder", code="profiling_off")
            if self._running is not None:
                raise ApiError(409, f"a trace is being written to {self._running}; stop it first", code="profiling")
            folder = self._folder / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S-%fZ")
            jax.profiler.start_trace(folder)
            self._running = folder
            return folder

    def stop(self) -> Path:
        """End the trace; its folder. ApiError 409 where none is running."""
        with self._lock:
            if self._running is None:
                raise ApiError(409, "no trace is being written; start one first", code="not_profiling")
            folder, self._running = self._running, None
            jax.profiler.stop_trace()
            return folder

    def close(self) -> None:
        """End the trace that somebody may have left running."""
        if self._running is not None:
            self.stop()
