"""What a prefill kept, passage by passage and segment by segment, from its result alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int32

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.results import PrefillResult

NO_BLOCK = -1


@dataclass(frozen=True)
class Mark:
    """A stretch of the prompt worth pointing at, tokens [start, stop)."""

    start: int
    stop: int
    label: str


@dataclass(frozen=True)
class DropRecord:
    """One drop layer.

    Attributes:
        layer: its number.
        block_mass: normalised score of each block of the tokens it scored; sums to 1.
        block_of_token: for every prompt token, its block here; NO_BLOCK where an earlier drop had removed it.
        kept: for every prompt token, whether it went on after this drop.
        discarded_mass: attention mass (mean over heads and window rows) of the blocks that lost tokens.
        cut_margin: smallest distance of a cumulative mass to top_p.
    """

    layer: int
    block_mass: Float[np.ndarray, " blocks"]
    block_of_token: Int32[np.ndarray, " tokens"]
    kept: Bool[np.ndarray, " tokens"]
    discarded_mass: float
    cut_margin: float

    @property
    def relative_mass(self) -> Float[np.ndarray, " blocks"]:
        """Scores over the score that every block would have if all were equal."""
        return self.block_mass * len(self.block_mass)

    @property
    def tokens_scored(self) -> int:
        """How many tokens took part."""
        return int((self.block_of_token != NO_BLOCK).sum())

    @property
    def tokens_kept(self) -> int:
        """How many went on."""
        return int(self.kept.sum())


@dataclass(frozen=True)
class Segment:
    """Layers that work on the same tokens: the first segment, then one after each drop.

    Attributes:
        layers: numbers of those whose attention they enter, rising; none where two drops follow each other directly.
        present: for every prompt token, whether it enters these layers.
    """

    layers: tuple[int, ...]
    present: Bool[np.ndarray, " tokens"]

    @property
    def tokens(self) -> int:
        """How many tokens enter."""
        return int(self.present.sum())

    @property
    def fraction(self) -> float:
        """Share of the prompt that enters."""
        return self.tokens / len(self.present)


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens that shared a block at every drop, and the same fate.

    Attributes:
        start, stop: the prompt's tokens [start, stop).
        text: what they spell.
        blocks: the block at each drop; NO_BLOCK after an earlier drop.
        kept: for each drop, whether the passage went on.
        forced: why it always stays: "sink", "window" or "" (it does not).
        mark: label of the mark it lies in, or "".
    """

    start: int
    stop: int
    text: str
    blocks: tuple[int, ...]
    kept: tuple[bool, ...]
    forced: str
    mark: str

    @property
    def drops_survived(self) -> int:
        """How many drops it went on after."""
        return sum(self.kept)


@dataclass(frozen=True)
class Explanation:
    """All of it; `text` of the passages, joined, is the prompt's."""

    drops: tuple[DropRecord, ...]
    segments: tuple[Segment, ...]
    passages: tuple[Passage, ...]
    num_tokens: int
    num_layers: int
    flop_fraction: float
    config: UniPrefillConfig

    @property
    def kept_to_the_end(self) -> float:
        """Share of the prompt that survived every drop."""
        survived = np.logical_and.reduce([np.ones(self.num_tokens, bool), *(drop.kept for drop in self.drops)])
        return float(survived.mean())


def explain_prefill(
    result: PrefillResult, pieces: Sequence[str], config: UniPrefillConfig, marks: Sequence[Mark] = ()
) -> Explanation:
    """Gather what happened to each token of one request.

    Args:
        result: the request's prefill.
        pieces: text of every prompt token.
        config: the setting that the prefill ran with.
        marks: stretches to point at, which do not overlap.
    """
    num_tokens = result.segment_lengths[0]
    assert len(pieces) == num_tokens, f"{len(pieces)} pieces of text for {num_tokens} tokens"
    config = config.for_length(num_tokens)
    # The tokens of segment i + 1 are those that the i-th drop kept.
    positions = [np.arange(num_tokens, dtype=np.int32), *result.kept_positions.values()]
    present = [_membership(entering, num_tokens) for entering in positions]
    drops = []
    for number, layer in enumerate(result.kept_positions):
        scored = positions[result.segment_of_layer[layer]]
        block_of_token = np.full(num_tokens, NO_BLOCK, np.int32)
        block_of_token[scored] = np.arange(len(scored)) // config.block_size
        drops.append(
            DropRecord(
                layer=layer,
                block_mass=result.block_mass[layer],
                block_of_token=block_of_token,
                kept=present[number + 1],
                discarded_mass=result.discarded_mass[layer],
                cut_margin=result.cut_margin[layer],
            )
        )
    segments = tuple(
        Segment(tuple(layer for layer, own in enumerate(result.segment_of_layer) if own == number), tokens)
        for number, tokens in enumerate(present)
    )
    return Explanation(
        drops=tuple(drops),
        segments=segments,
        passages=_passages(drops, pieces, config, marks),
        num_tokens=num_tokens,
        num_layers=len(result.segment_of_layer),
        flop_fraction=result.flop_fraction,
        config=config,
    )


def _membership(positions: Int32[np.ndarray, " kept"], num_tokens: int) -> Bool[np.ndarray, " tokens"]:
    present = np.zeros(num_tokens, bool)
    present[positions] = True
    return present


def _passages(
    drops: Sequence[DropRecord], pieces: Sequence[str], config: UniPrefillConfig, marks: Sequence[Mark]
) -> tuple[Passage, ...]:
    """The prompt cut wherever a block, a fate, the forced part or a mark begins or ends."""
    num_tokens = len(pieces)
    tokens = np.arange(num_tokens)
    sink, window = tokens < config.sink_tokens, tokens >= num_tokens - config.window_tokens
    mark_of_token = np.full(num_tokens, NO_BLOCK, np.int32)
    for number, mark in enumerate(marks):
        mark_of_token[mark.start : mark.stop] = number
    features = [feature for drop in drops for feature in (drop.block_of_token, drop.kept)]
    table = np.stack([np.asarray(feature, np.int32) for feature in (*features, sink, window, mark_of_token)])
    cuts = np.flatnonzero((table[:, 1:] != table[:, :-1]).any(axis=0)) + 1
    passages = []
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), num_tokens], strict=True):
        mark = int(mark_of_token[start])
        passages.append(
            Passage(
                start=start,
                stop=stop,
                text="".join(pieces[start:stop]),
                blocks=tuple(int(drop.block_of_token[start]) for drop in drops),
                kept=tuple(bool(drop.kept[start]) for drop in drops),
                forced="sink" if sink[start] else "window" if window[start] else "",
                mark=marks[mark].label if mark != NO_BLOCK else "",
            )
        )
    return tuple(passages)
