"""The model's tokenizer: byte-level BPE with one token for every number of up to three digits.

Numbers are cut into groups of three digits from the left, so that seven digits are three tokens. Any text can be
encoded; words of the synthetic text are one to three tokens.
"""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training import templates, words

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_SIZE = 2048
# A word with the space before it, up to three digits, one character of anything else with the space before it, spaces.
_PIECES = Regex(r" ?\p{L}+|\d{1,3}| ?[^\s\p{L}\d]|\s+(?!\S)|\s")
# How often each number stands in the text that merges are learnt from: more often than any pair of letters needs.
_NUMBER_COUNT = 2000
_TEMPLATE_COUNT = 3000
_KEY_WORD_COUNT = 40


def build_tokenizer() -> Tokenizer:
    """Learn the merges from the synthetic text itself and the bundled prose; the same result every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the tokenizer as transformers reads it (tokenizer.json, tokenizer_config.json)."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    ).save_pretrained(folder)


def bundled_prose() -> str:
    """Public-domain prose: the document of the demo."""
    return resources.files("uniprefill_jax.demo").joinpath("areopagitica.txt").read_text(encoding="utf-8")


def _texts() -> Iterator[str]:
    random = np.random.default_rng(0)
    for _ in range(_NUMBER_COUNT):
        yield " ".join([*(f"{number:02}" for number in range(100)), *(f"{number:03}" for number in range(1000))])
    for _ in range(_TEMPLATE_COUNT):
        yield " ".join(templates.ALL_TEXT)
    for _ in range(20):
        yield bundled_prose()
    for _ in range(20_000):
        yield words.sentence(random)
    for _ in range(4000):
        yield f" {words.key(random)}"
    for _ in range(_KEY_WORD_COUNT):
        yield " ".join(["", *words.ADJECTIVES]) + "-".join(["", *words.NOUNS])
