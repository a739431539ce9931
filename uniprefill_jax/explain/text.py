"""The text behind each token of a prompt."""

from collections.abc import Sequence

from uniprefill_jax.tokenizer import StreamDecoder, Tokenizer


def token_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """One piece of text per token, special tokens spelled out; joined, the pieces are the prompt's text.

    A character that several byte-level tokens share belongs to the token that completes it; the others are empty.
    """
    decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
    pieces = [decoder.push(token) for token in token_ids]
    if pieces:
        pieces[-1] += decoder.finish()
    return pieces
