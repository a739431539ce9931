"""The selection rule in float64 numpy, written from the description and not from the library's code.

One request at a time, one block at a time, with explicit loops: slow and easy to check by eye.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """Settings of the rule; names and defaults as in `UniPrefillConfig`."""

    top_p: float = 0.99
    block_size: int = 64
    sink_tokens: int = 128
    window_tokens: int = 128
    drop_layers: tuple[int, ...] = ()
    dropped_tokens: str = "discard"
    sliding_window: str = "position"
    cut: str = "crossing"
    score: str = "mean"
    score_memory: float = 0.0
    top_p_over: str = "all"


@dataclass(frozen=True)
class Choice:
    """What the rule keeps of one request.

    kept: bool[length] mask over the tokens. normalised: scores over their sum. margin: smallest distance of a
    cumulative that the cut looks at to p, as `PrefillResult.cut_margin`. gap: distance, in normalised score, to the
    nearest change of the outcome: the margin, or how far apart the last kept and the first dropped block's scores are.
    """

    kept: np.ndarray
    normalised: np.ndarray
    margin: float
    gap: float


def block_scores(queries: np.ndarray, keys: np.ndarray, scale: float, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(mass, peak) of every block of one request, float64.

    queries [n, H, d] are those of the last n tokens, keys [T, KV, d] of all; both after norm and rotary embedding.
    mass: mean over query heads and rows of the attention that falls in the block. peak: the maximum over them.
    """
    rows, heads, _ = queries.shape
    length, kv_heads, _ = keys.shape
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    first = length - rows
    per_row = np.empty((heads, rows, -(-length // block_size)))
    for head in range(heads):
        key = keys[:, head // (heads // kv_heads)]
        logits = scale * queries[:, head] @ key.T
        logits[np.arange(length)[None] > first + np.arange(rows)[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        per_row[head] = np.add.reduceat(weights, np.arange(0, length, block_size), axis=1)
    return per_row.mean(axis=(0, 1)), per_row.max(axis=(0, 1))


def choose(scores: np.ndarray, length: int, rule: Rule) -> Choice:
    """Which of `length` tokens stay, given one score per block."""
    size = rule.block_size
    count = -(-length // size)
    scores = np.asarray(scores, np.float64)[:count]
    token = np.arange(length)
    forced = (token < rule.sink_tokens) | (token >= length - rule.window_tokens)
    normalised = scores / scores.sum() if count else scores
    if forced.all() or rule.top_p >= 1.0:
        return Choice(np.ones(length, bool), normalised, np.inf, np.inf)

    blocks = [range(block * size, min(length, (block + 1) * size)) for block in range(count)]
    taking_part = [
        block for block in range(count) if rule.top_p_over == "all" or not all(forced[row] for row in blocks[block])
    ]
    ordered = sorted(taking_part, key=lambda block: (-scores[block], -block))
    total = sum(scores[block] for block in taking_part)
    kept, before, margin = set(), 0.0, np.inf
    for rank, block in enumerate(ordered):
        after = before + scores[block]
        if rule.cut == "crossing":
            compared = before / total
            stays = compared <= rule.top_p
        else:
            compared = after / total
            stays = compared <= rule.top_p or rank == 0
        if stays:
            kept.add(block)
        margin = min(margin, abs(compared - rule.top_p))
        before = after
    gap = margin
    if len(kept) < len(ordered):
        gap = min(gap, (scores[ordered[len(kept) - 1]] - scores[ordered[len(kept)]]) / total)
    mask = forced.copy()
    for block in kept:
        mask[list(blocks[block])] = True
    return Choice(mask, normalised, float(margin), float(gap))
