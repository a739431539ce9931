"""What the scheduler decides and the executor runs: the pieces of prefill and the rows of a decode step."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from uniprefill_jax.engine.requests import Pack, Request


@dataclass(frozen=True)
class Piece:
    """One request's rows of a unit: [start, start + count) of its stage. All else is said of the last part alone.

    Attributes:
        ends_stage, ends_prefill: whether these rows are the stage's last, and the stage the last one.
        saved_rows: afterwards, pages of the prefix cache to write rows to: (number of a page of tokens, pages).
        saved_state: afterwards, the slot of the prefix cache to copy the recurrent state to; -1 for none.
    """

    request: Request
    start: int
    count: int
    ends_stage: bool = False
    ends_prefill: bool = False
    saved_rows: tuple[tuple[int, Int32[np.ndarray, " row_pages"]], ...] = ()
    saved_state: int = -1


@dataclass(frozen=True)
class Unit:
    """One piece of prefill: a chunk of one or more requests through one part of a stage.

    Attributes:
        pack: the chunk; its members may have left by the time that the unit is run, the pieces say who was there.
        ends_chunk: whether it is the last part.
    """

    pack: Pack
    stage: int
    part: int
    pieces: tuple[Piece, ...]
    ends_chunk: bool


class DecodeRow(NamedTuple):
    """One request's part of a decode step: the pages added for it as (layer, column, id)."""

    request: Request
    new_pages: list[tuple[int, int, int]]


@dataclass
class StepPlan:
    """What one step does."""

    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
