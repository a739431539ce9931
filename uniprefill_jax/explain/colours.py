"""How scores become colours: one scale for the page and the picture."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from uniprefill_jax.explain.gather import DropRecord

# Viridis without its darkest tenth, which would vanish on a dark page: even steps to every kind of colour vision.
STOPS = (
    "#482475",
    "#414487",
    "#355f8d",
    "#2a788e",
    "#21918c",
    "#22a884",
    "#44bf70",
    "#7ad151",
    "#bddf26",
    "#fde725",
)
WIDEST = 1000.0  # between the ends of a scale; a score further down has the colour of the lower end


@dataclass(frozen=True)
class ColourScale:
    """A logarithmic scale of scores relative to an even share, 0 < low < high."""

    low: float
    high: float

    @classmethod
    def for_drops(cls, drops: Iterable[DropRecord]) -> "ColourScale":
        """A scale that spans every score of all drops."""
        scores = [float(score) for drop in drops for score in drop.relative_mass]
        high = max(scores, default=1.0)
        positive = [score for score in scores if score > 0]
        low = max(min(positive, default=high), high / WIDEST)
        return cls(low, high) if low < high else cls(high / 2, high * 2)

    def share(self, score: float) -> float:
        """Where a score lies between the ends, in [0, 1]."""
        clipped = min(max(score, self.low), self.high)
        return math.log(clipped / self.low) / math.log(self.high / self.low)

    def colour(self, score: float) -> str:
        """The colour of a score, as #rrggbb."""
        place = self.share(score) * (len(STOPS) - 1)
        first = min(int(place), len(STOPS) - 2)
        return _mix(STOPS[first], STOPS[first + 1], place - first)


def _mix(first: str, second: str, share: float) -> str:
    channels = [
        round(int(first[at : at + 2], 16) * (1 - share) + int(second[at : at + 2], 16) * share) for at in (1, 3, 5)
    ]
    return "#" + "".join(f"{channel:02x}" for channel in channels)
