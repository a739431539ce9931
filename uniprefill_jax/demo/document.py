"""The bundled document with a fact planted in it, and the question about that fact."""

from dataclasses import dataclass
from importlib import resources

from uniprefill_jax.tokenizer import Tokenizer

SECRET = "4817263"
FACT = f"The special magic number for the harbour is: {SECRET}."
QUESTION = "What is the special magic number for the harbour mentioned in the text above?"
ANSWER_START = "The special magic number for the harbour mentioned in the text above is:"


@dataclass(frozen=True)
class DemoPrompt:
    """A tokenised question to the document.

    Attributes:
        token_ids: the whole prompt.
        fact_position: the prompt's token at which the planted fact begins.
    """

    token_ids: list[int]
    fact_position: int


def build_prompt(tokenizer: Tokenizer, depth: float) -> DemoPrompt:
    """The document with the fact planted at `depth` of its length, followed by the question.

    A model with a chat template gets it as the user's turn; a base model gets it as text to continue.

    Args:
        tokenizer: the model's own.
        depth: where the fact goes, from 0 (start) to 1 (end); it is put between the two nearest paragraphs.
    """
    before, after = _split_document(depth)
    text = "\n\n".join([*before, FACT, *after, QUESTION])
    if tokenizer.has_chat_template:
        token_ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    else:
        token_ids = tokenizer.encode(f"{text}\n\n{ANSWER_START}")
    return DemoPrompt(token_ids, _position_of(tokenizer, token_ids, FACT))


def _split_document(depth: float) -> tuple[list[str], list[str]]:
    """The document's paragraphs before and after the place nearest to `depth`."""
    text = resources.files(__package__).joinpath("areopagitica.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    ends = [0]
    for paragraph in paragraphs:
        ends.append(ends[-1] + len(paragraph))
    split = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))
    return paragraphs[:split], paragraphs[split:]


def _position_of(tokenizer: Tokenizer, token_ids: list[int], text: str) -> int:
    """Index of the first token of `text` in the prompt, found by bisecting for the shortest prefix that contains it."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        if text in tokenizer.decode(token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low - len(tokenizer.encode(text, add_special_tokens=False))
