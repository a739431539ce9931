"""The curriculum: how long documents are and how large a step is, by the share of the time that is gone."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Documents of one length.

    Attributes:
        length: tokens of a document.
        batch: documents in a step.
        until: share of the training time at which the stage ends.
    """

    length: int
    batch: int
    until: float


# Looking things up is learnt from short documents, many of them; longer ones then need few steps each.
CURRICULUM = (
    Stage(512, 64, 0.32),
    Stage(1024, 32, 0.5),
    Stage(2048, 32, 0.7),
    Stage(4096, 16, 0.92),
    Stage(8192, 8, 1.0),
)
PEAK_RATE = 1.5e-3
LAST_RATE = 0.05  # of the peak
WARM_UP_STEPS = 200


def learning_rate(step: int, gone: float) -> float:
    """Linear warm-up by steps, then a cosine over the share of time that is gone."""
    decayed = LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(gone, 1.0)))
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * decayed
