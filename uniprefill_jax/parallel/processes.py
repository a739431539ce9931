"""Several processes as one run: JAX's own runtime joins them and watches over them; here its failures get a name.

Every process runs the same program on the same inputs, or does what process 0 tells it to. A process that dies takes
the others with it: their next exchange fails, or the runtime misses its heartbeat and ends them.
"""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from uniprefill_jax.errors import ConfigError, UniPrefillError

JOIN_SECONDS = 60
# A dead process is noticed after this long where no exchange fails before.
HEARTBEAT_SECONDS = 20
SHUTDOWN_SECONDS = 10
FAILED_EXIT_CODE = 2


@contextmanager
def joined_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    join_seconds: int = JOIN_SECONDS,
) -> Iterator[None]:
    """Be one process of a run while the block lasts; must come before anything that uses a device.

    Args:
        coordinator_address: host and port of process 0, which the others can reach.
        num_processes: how many there are.
        process_id: which this one is, from 0.
        join_seconds: how long to wait for the others.

    Without arguments all three are found out on TPU pods, under Slurm, Kubernetes (indexed jobs) and Open MPI.

    Raises ConfigError where they cannot be found out or do not fit together. When the others do not come, or an
    unexpected error ends the block (another process has died, for one), this process ends, with one line that says so,
    without waiting for the others.
    """
    explicit = {
        "--coordinator-address": coordinator_address,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    missing = [name for name, value in explicit.items() if value is None]
    if missing and len(missing) < len(explicit):
        raise ConfigError(
            f"{' and '.join(missing)} missing: give all of {', '.join(explicit)}, or none where they are found out"
        )
    if coordinator_address is not None and not coordinator_address.rpartition(":")[2].isdigit():
        raise ConfigError(f"--coordinator-address is {coordinator_address!r}; use host:port, such as 10.0.0.1:8476")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process-id is {process_id} and --num-processes {num_processes}; number the processes from 0 up to "
            f"{num_processes - 1}"
        )
    where = "" if missing else f" {process_id} of {num_processes}, with process 0 at {coordinator_address},"
    late = f"process{where} has waited {join_seconds} s for the others to join; are all of them started, and reachable?"
    # The runtime would end the process too, a little later and with a stack trace.
    watch = threading.Timer(join_seconds, _end, (late,))
    watch.daemon = True
    watch.start()
    try:
        # Or the runtime catches SIGTERM, and the process lives on when it is told to end.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            cluster_detection_method=None if missing else "deactivate",
            initialization_timeout=join_seconds + 5,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"this process could not join a run ({str(error).rstrip('.')}); outside TPU pods, Slurm, Kubernetes and "
            f"Open MPI give {', '.join(explicit)}"
        ) from None
    finally:
        watch.cancel()
    try:
        yield
    except UniPrefillError:
        raise
    except Exception:
        traceback.print_exc()
        _end(
            f"process {jax.process_index()} of {jax.process_count()} failed, as the lines above tell; if another one "
            "has died, its output says why. Start all of them again"
        )


def _end(message: str) -> None:
    """End the process at once: leaving in order would wait for processes that are gone."""
    print("error:", message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(FAILED_EXIT_CODE)
