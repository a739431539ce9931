"""Static lengths for dynamic token counts: buckets for prompts, a ladder of lengths for what is left after drops.

Every array under jit has a static length. A prompt batch is padded to a bucket (eight per octave, so that padding is
4% on average); after a drop the next segment runs at the shortest rung of the ladder that holds the kept tokens.
"""

import math

ROW_MULTIPLE = 64
BUCKETS_PER_OCTAVE = 8
LADDER_SIXTEENTHS = tuple(range(16, 0, -1))


def prompt_bucket(num_tokens: int) -> int:
    """Rows that a batch of `num_tokens` prompt tokens is padded to."""
    step = max(ROW_MULTIPLE, 2 ** max(0, num_tokens - 1).bit_length() // (2 * BUCKETS_PER_OCTAVE))
    return math.ceil(max(num_tokens, 1) / step) * step


def request_bucket(num_requests: int) -> int:
    """Request slots that a batch is padded to: a power of two."""
    return 1 << max(0, num_requests - 1).bit_length()


def length_ladder(num_rows: int) -> tuple[int, ...]:
    """Lengths, rising, at which a segment after a drop may run; the last is `num_rows` itself."""
    rungs = {math.ceil(num_rows * part / 16 / ROW_MULTIPLE) * ROW_MULTIPLE for part in LADDER_SIXTEENTHS}
    return tuple(sorted({min(rung, num_rows) for rung in rungs}))
