"""Real prose as a haystack: stretches of a text, with sentences put between its own."""

import random
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from uniprefill_jax.errors import InputError
from uniprefill_jax.tokenizer import Tokenizer

_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")


class Prose:
    """A text and its tokens."""

    def __init__(self, tokenizer: Tokenizer, path: Path | None = None):
        """Read `path`, or the bundled pamphlet (Milton's Areopagitica, 1644: some 3,500 tokens).

        Raises:
            InputError: the file is not UTF-8 text.
        """
        self.name = "the bundled text" if path is None else str(path)
        source = path or resources.files("uniprefill_jax.demo").joinpath("areopagitica.txt")
        try:
            text = source.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text ({error}); convert it first") from None
        self.tokenizer = tokenizer
        self.token_ids = tokenizer.encode(" ".join(text.split()), add_special_tokens=False)

    def stretch(self, tokens: int, draw: random.Random) -> list[int]:
        """So many tokens in a row from somewhere in the text.

        Raises:
            InputError: the text is shorter.
        """
        most = len(self.token_ids) - tokens
        if most < 0:
            raise InputError(
                f"{self.name} has {len(self.token_ids)} tokens, {tokens} are needed; give a longer text with --prose"
            )
        start = draw.randint(0, most)
        return self.token_ids[start : start + tokens]

    def haystack(self, tokens: int, needles: Sequence[str], draw: random.Random) -> str:
        """A stretch with the needles between its sentences, in drawn order, together about `tokens` long."""
        needed = sum(len(self.tokenizer.encode(f" {needle}", add_special_tokens=False)) for needle in needles)
        text = self.tokenizer.decode(self.stretch(max(tokens - needed, 0), draw)).strip()
        sentences = _SENTENCE_END.split(text)
        for needle in draw.sample(needles, len(needles)):
            sentences.insert(draw.randint(0, len(sentences) - 1), needle)  # the last may be cut off
        return " ".join(sentence for sentence in sentences if sentence)
