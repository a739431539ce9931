"""What a prefill and a generation return."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int32


@dataclass(frozen=True)
class PrefillResult:
    """One request's prefill.

    Attributes:
        logits: float32 [vocab], of the last prompt token.
        kept_positions: for every drop layer, the original positions that stayed, rising.
        block_mass: for every drop layer, the normalised score of each block of the tokens it scored; sums to 1.
        cut_margin: for every drop layer, the smallest distance of a cumulative mass to top_p: ties are near 0.
        kv_lengths: for every layer, how many prompt tokens its cache holds; 0 for recurrent layers.
        segment_of_layer: which segment's tokens enter each layer.
        segment_lengths: tokens of every segment; the first is the prompt's length.
        flop_fraction: operations over those of a dense prefill, by the cost model.
        discarded_mass: for every drop layer, the attention mass (mean over heads and window rows) of blocks that lost
            tokens: at most what was discarded.
        seconds: time of the compiled prefill of the whole batch.
        compile_seconds: time spent compiling for this call; 0 when the program was ready.
        computed_attention: for every layer that leaves entries of full attention out, the share that it computes.
    """

    logits: Float[np.ndarray, " vocab"]
    kept_positions: dict[int, Int32[np.ndarray, " kept"]]
    block_mass: dict[int, Float[np.ndarray, " blocks"]]
    cut_margin: dict[int, float]
    kv_lengths: Int32[np.ndarray, " layers"]
    segment_of_layer: tuple[int, ...]
    segment_lengths: tuple[int, ...]
    flop_fraction: float
    discarded_mass: dict[int, float]
    seconds: float
    compile_seconds: float
    computed_attention: dict[int, float] = field(default_factory=dict)

    @property
    def ideal_speedup(self) -> float:
        """How much faster than dense the prefill could be if time followed operations."""
        return 1.0 / self.flop_fraction


@dataclass(frozen=True)
class Completion:
    """One request's generated text.

    Attributes:
        token_ids: generated tokens; a token that ended the text is the last of them.
        text: the tokens decoded, without the stop string; empty when there is no tokenizer.
        finish_reason: "stop" (end-of-sequence token or stop string) or "length".
        prefill: the request's prefill.
        decode_seconds: time from the first token to the last, of the whole batch, without compiling.
        decode_compile_seconds: time spent compiling for that; 0 when the programs were ready.
        continuation_logprobs: natural log-probability of every token that was given to follow the prompt.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    prefill: PrefillResult
    decode_seconds: float = field(default=0.0)
    decode_compile_seconds: float = field(default=0.0)
    continuation_logprobs: Float[np.ndarray, " given"] = field(default_factory=lambda: np.zeros(0, np.float32))
