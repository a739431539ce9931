"""Where a prefill's time goes: a jax.profiler trace read back into a table of the algorithm's own steps.

Every step of the models runs under a `jax.named_scope`, which XLA carries along into the metadata of its instructions;
the compiled program's text says which instruction belongs to which step, and the trace says when each one ran.
"""

import re
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

SHARED_EXPERT = "shared_expert"
# In the order in which a reader meets them; the innermost of these names in an instruction's scope is its step.
STEPS = (
    "embedding",
    "norm",
    "qkv",
    "rope",
    "attention_full",
    "attention_sliding",
    "attention_output",
    "qkvz",
    "causal_conv",
    "gated_delta_rule",
    "linear_attention_output",
    "cache_write",
    "residual",
    "feed_forward",
    "router",
    "experts",
    SHARED_EXPERT,
    "score",
    "select",
    "compact",
    "logits",
)
COLLECTIVES = "collectives"
OTHER = "other"
COLLECTIVE_OPCODES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
CONTROL_FLOW = ("while", "conditional", "call", "async-start", "async-done")  # they span what runs inside them

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(", re.M)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")  # the first word before a bracket: types have none that begin so
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"(?:calls|to_apply)=%([\w.\-]+)")


class Operation(NamedTuple):
    """One thing that ran: its instruction's name and when, in nanoseconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Profile:
    """One traced run.

    Attributes:
        seconds: busy time by step, rising order of `STEPS`; on a CPU summed over the threads.
        counts: operations by step.
        span: seconds from the first operation's start to the last one's end.
        gaps: seconds of the span in which nothing ran.
        unknown: instructions that the program's text does not name, by time.
    """

    seconds: dict[str, float]
    counts: dict[str, int]
    span: float
    gaps: float
    unknown: dict[str, float]


def trace(run: Callable[[], Any], program_text: str, folder: Path | None = None) -> Profile:
    """Run once under the profiler and read the trace; `folder` keeps it for a trace viewer.

    Raises:
        RuntimeError: the trace holds no operation of the program (a backend without profiler support).
    """
    with tempfile.TemporaryDirectory() as scratch:
        target = folder or Path(scratch)
        with jax.profiler.trace(str(target)):
            jax.block_until_ready(run())
        newest = max(target.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        operations = read_operations(newest)
    if not operations:
        raise RuntimeError(f"the trace of a {jax.default_backend()} program holds no operation; is its profiler there?")
    return summarise(operations, steps_of(program_text))


def read_operations(path: Path) -> list[Operation]:
    """Operations of compiled programs in a trace file, on all devices."""
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    operations = []
    with warnings.catch_warnings():
        # Reading statistics warns of a deprecation in jaxlib itself; as an error that would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for line in (line for plane in devices or planes for line in plane.lines):
            if devices and not (line.name.startswith("Stream") or line.name == "XLA Ops"):
                continue  # a CPU's operations are among the host's events
            for event in line.events:
                name = next((value for key, value in event.stats if key == "hlo_op"), None)
                if name is not None:
                    operations.append(Operation(str(name), event.start_ns, event.duration_ns))
    return operations


def steps_of(program_text: str) -> dict[str, str | None]:
    """For every instruction of a compiled program its step; None for control flow, whose time is its contents'."""
    bodies = dict(zip(_COMPUTATION.findall(program_text), _COMPUTATION.split(program_text)[2::2], strict=True))
    steps: dict[str, str | None] = {}
    for body in bodies.values():
        for line in body.splitlines():
            match = _INSTRUCTION.match(line)
            opcode = _OPCODE.search(line, match.end() - 1) if match else None
            if match is not None and opcode is not None:
                steps[match[1]] = _step_of_line(line, opcode[1], bodies)
    return steps


def _step_of_line(line: str, opcode: str, bodies: dict[str, str]) -> str | None:
    if opcode in CONTROL_FLOW:
        return None
    if opcode.startswith(COLLECTIVE_OPCODES):
        return COLLECTIVES
    name = _OP_NAME.search(line)
    step = _innermost(name[1]) if name else None
    called = _CALLS.search(line)
    if step is None and called is not None:  # a fusion without a name of its own: what most of it is from
        inner = map(_innermost, _OP_NAME.findall(bodies.get(called[1], "")))
        step = next(iter(Counter(filter(None, inner)).most_common(1)), (None,))[0]
    return step or OTHER


def _innermost(scope: str) -> str | None:
    parts = scope.split("/")
    if SHARED_EXPERT in parts:  # it is a feed-forward layer, and named so inside
        return SHARED_EXPERT
    return next((part for part in reversed(parts) if part in STEPS), None)


def summarise(operations: list[Operation], steps: dict[str, str | None]) -> Profile:
    """Time by step, and the time between operations."""
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    unknown: defaultdict[str, float] = defaultdict(float)
    busy, end = 0.0, 0.0
    spans = sorted(operations, key=lambda operation: operation.start)
    for operation in spans:
        step = steps.get(operation.name, OTHER)
        if step is None:
            continue
        if operation.name not in steps:
            unknown[operation.name] += operation.duration * 1e-9
        seconds[step] += operation.duration * 1e-9
        counts[step] += 1
        stop = operation.start + operation.duration
        busy += max(0.0, stop - max(operation.start, end))
        end = max(end, stop)
    span = end - spans[0].start
    order = [step for step in (*STEPS, COLLECTIVES, OTHER) if step in seconds]
    return Profile(
        {step: seconds[step] for step in order},
        {step: counts[step] for step in order},
        span * 1e-9,
        (span - busy) * 1e-9,
        dict(sorted(unknown.items(), key=lambda item: -item[1])),
    )
