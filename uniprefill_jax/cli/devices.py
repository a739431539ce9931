"""Options for several devices and processes, and what they open; any command that loads a model may take them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from uniprefill_jax.errors import InputError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from uniprefill_jax.config import EngineConfig
    from uniprefill_jax.engine.engine import Engine
    from uniprefill_jax.llm import LLM

DEVICES = "Several devices and processes"

TensorParallelOption = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        help="Cut the model over so many devices; by default one, with --distributed all.",
        rich_help_panel=DEVICES,
    ),
]
DistributedOption = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="One of several processes of a run (docs/launch.md); TPU pods, Slurm, Kubernetes are found out.",
        rich_help_panel=DEVICES,
    ),
]
CoordinatorAddressOption = Annotated[
    str | None,
    typer.Option("--coordinator-address", help="host:port of process 0, elsewhere.", rich_help_panel=DEVICES),
]
NumProcessesOption = Annotated[
    int | None, typer.Option("--num-processes", min=1, help="How many there are.", rich_help_panel=DEVICES)
]
ProcessIdOption = Annotated[
    int | None, typer.Option("--process-id", min=0, help="Which one this is, from 0.", rich_help_panel=DEVICES)
]


@dataclass(frozen=True)
class Devices:
    """Where a command runs.

    Attributes:
        mesh: what `LLM.load` takes; None for one device.
        speaks: whether this process is the one that prints and writes.
    """

    mesh: "Mesh | None"
    speaks: bool


@contextmanager
def open_devices(
    tensor_parallel_size: int | None,
    distributed: bool = False,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Iterator[Devices]:
    """The devices that the options name, while the block lasts.

    Raises InputError or ConfigError for options that do not fit together, or too few devices.
    """
    given = (coordinator_address, num_processes, process_id)
    if not distributed and any(option is not None for option in given):
        raise InputError(
            "--coordinator-address, --num-processes and --process-id belong to a run of several processes; "
            "add --distributed"
        )
    if not distributed:
        yield Devices(_mesh(tensor_parallel_size), speaks=True)
        return
    import jax

    from uniprefill_jax.parallel.processes import joined_processes

    with joined_processes(*given):
        size = jax.device_count() if tensor_parallel_size is None else tensor_parallel_size
        yield Devices(_mesh(size), speaks=jax.process_index() == 0)


@contextmanager
def open_engine(llm: "LLM", config: "EngineConfig") -> "Iterator[Engine | None]":
    """An engine over the devices that are open, while the block lasts.

    None in all processes but the first: they have repeated what it did with its engine, and it is done. Clusters send
    the signal to end to all processes; it is for the first one to end the work and to let the others go.
    """
    import jax

    from uniprefill_jax.engine.engine import Engine
    from uniprefill_jax.engine.leading import follow, leading

    if jax.process_count() == 1:
        yield Engine(llm, config)
    elif jax.process_index() == 0:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with leading(llm, config) as engine:
            yield engine
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        follow(llm)
        yield None


def _mesh(tensor_parallel_size: int | None) -> "Mesh | None":
    if tensor_parallel_size is None:
        return None
    from uniprefill_jax.parallel.mesh import make_mesh

    return make_mesh(tensor_parallel_size)
