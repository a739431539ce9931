"""Text to token ids and back, through transformers (imported when first needed; torch is not)."""

import json
import logging
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from checkpoints_convert.gguf_config import END_TOKENS
from checkpoints_convert.gguf_reader import GgufSource
from checkpoints_convert.source import CheckpointSource, one_line, read_json
from uniprefill_jax.errors import CheckpointError, InputError

_TOKENIZER = "tokenizer.json"
_GENERATION = "generation_config.json"
# Everything beside the weights that decides how text becomes tokens, and when generation stops.
_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    _GENERATION,
)
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how decoders spell bytes that are not yet a character
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how sentencepiece vocabularies spell a byte
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # and a space
# How byte-level vocabularies (GPT-2's and later ones) spell bytes: as themselves where that can be printed.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}

Message = dict[str, str]


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        eos_token_ids: ids after which generation stops, rising.
        vocab_size: number of ids the tokenizer knows; a model's embedding may have more rows.
    """

    def __init__(self, backend: Any, eos_token_ids: Iterable[int], folder: Path | None = None):
        """Wrap a transformers tokenizer; `folder` holds its files if it was read from any."""
        self._backend = backend
        self._folder = folder
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(eos_token_ids)))
        self.vocab_size: int = len(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in it are recognised."""
        # Without `verbose` transformers warns of long texts; whether a prompt fits is for the model to say.
        return self._backend.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the vocabulary (a model may have such rows) have none. InputError below 0."""
        ids = [int(token_id) for token_id in ids]
        for token_id in ids:
            if token_id < 0:
                raise InputError(f"token id {token_id} is negative; ids count from 0")
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text, also where they are only part of a character; none beyond the
        vocabulary.
        """
        piece = self._backend.convert_ids_to_tokens(int(token_id))
        if piece is None:
            return b""
        text = self.decode([token_id], skip_special_tokens=False)
        if _INCOMPLETE in text:
            if match := _BYTE_TOKEN.fullmatch(piece):
                return bytes([int(match[1], 16)])
            if all(letter in _BYTE_OF_LETTER for letter in piece):
                return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
        if piece.startswith(_SPACE_MARK) and not text.startswith(" "):
            text = " " + text  # decoders strip the space of a text's first word
        return text.encode()

    @property
    def longest_token(self) -> int:
        """Most bytes that one token stands for, or more: a text of n characters has at least n / this tokens."""
        return max(map(len, self._backend.get_vocab()))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return bool(self._backend.chat_template)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; InputError if the template refuses it."""
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise InputError("this model has no chat template; pass plain text or token ids")
        try:
            text = self._backend.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InputError(f"the chat template refuses these messages: {one_line(error)}") from None
        return self.encode(text, add_special_tokens=False)  # the template writes the begin token itself

    def stream_decoder(self) -> "StreamDecoder":
        """A decoder that turns tokens into text one by one."""
        return StreamDecoder(self)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, and the ids that end generation, into an existing folder."""
        if self._folder is None:
            self._backend.save_pretrained(folder)
            text = json.dumps({"eos_token_id": list(self.eos_token_ids)}, indent=2)
            (folder / _GENERATION).write_text(text + "\n", encoding="utf-8")
            return
        for name in _FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


class StreamDecoder:
    """Text of a growing sequence of ids, piece by piece: the pieces add up to the whole sequence's `decode`.

    A piece is held back while it ends in the middle of a character. Each step decodes only the tokens since the last
    whole piece and the piece before it, which decides about spaces between words. (Sentencepiece decoders take back a
    character if byte tokens that are no character follow it at once; a piece that was given out stays.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        """Start an empty sequence."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # first token that is decoded
        self._sent = 0  # tokens whose text was given out

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became certain, often empty."""
        self._ids.append(int(token_id))
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._context, self._sent = self._sent, len(self._ids)
        return piece

    def finish(self) -> str:
        """The text held back so far; call it once, after the last token."""
        piece = self._pending()
        self._context = self._sent = len(self._ids)
        return piece

    def _pending(self) -> str:
        context = self._tokenizer.decode(self._ids[self._context : self._sent], self._skip)
        return self._tokenizer.decode(self._ids[self._context :], self._skip)[len(context) :]


def load_tokenizer(source: CheckpointSource) -> Tokenizer | None:
    """The tokenizer that comes with a checkpoint, or None if it has none; CheckpointError if its files are damaged."""
    if isinstance(source, GgufSource):
        backend, folder = _gguf_backend(source), None
    else:
        folder = source.path if source.path.is_dir() else source.path.parent
        backend = _folder_backend(folder)
    if backend is None:
        return None
    return Tokenizer(backend, _end_token_ids(source, folder, backend), folder)


def _fast_tokenizer_class() -> Any:
    """transformers' wrapper of a `tokenizers` tokenizer, taking each tokenizer.json at its word."""
    # transformers says on import that it found no torch, which nobody needs here.
    quiet = _WithoutTorchNotice()
    logger = logging.getLogger("transformers")
    logger.addFilter(quiet)
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        logger.removeFilter(quiet)
    return PreTrainedTokenizerFast


class _WithoutTorchNotice(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()


def _gguf_backend(source: GgufSource) -> Any:
    wrapper = _fast_tokenizer_class()
    from checkpoints_convert.gguf_tokenizer import build_tokenizer

    try:
        tokenizer = build_tokenizer(source.path, str(source.architecture), source.metadata)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for an inconsistent vocabulary
        raise CheckpointError(f"{source.path}: its tokenizer cannot be built ({one_line(error)})") from None
    if tokenizer is None:
        return None
    names = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = source.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        names[f"{role}_token"] = tokenizer.id_to_token(token_id)
        if names[f"{role}_token"] is None:
            raise CheckpointError(
                f"{source.path}: tokenizer.ggml.{key}_token_id is {token_id}, the vocabulary has "
                f"{tokenizer.get_vocab_size()} tokens; convert the model again"
            )
    return wrapper(
        tokenizer_object=tokenizer,
        chat_template=source.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=source.config["max_position_embeddings"],
        **names,
    )


def _folder_backend(folder: Path) -> Any:
    if not (folder / _TOKENIZER).is_file():
        return None
    try:
        return _fast_tokenizer_class().from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise CheckpointError(
            f"{folder}: its tokenizer files cannot be read ({one_line(error)}); fetch them again"
        ) from None


def _end_token_ids(source: CheckpointSource, folder: Path | None, backend: Any) -> set[int]:
    """Ids that end generation: config.json's, generation_config.json's, the tokenizer's, and the usual end markers.

    Published checkpoints disagree with themselves: a chat model's config may name the end of a text only, and its
    tokenizer the end of a turn.
    """
    text_config = source.config.get("text_config") or {}
    named = [source.config.get("eos_token_id"), text_config.get("eos_token_id"), backend.eos_token_id]
    if folder is not None and (folder / _GENERATION).is_file():
        named.append(read_json(folder / _GENERATION).get("eos_token_id"))
    ends = {token_id for entry in named for token_id in (entry if isinstance(entry, list) else [entry])}
    ends.update(
        token_id
        for token_id, token in backend.added_tokens_decoder.items()
        if token.special and token.content in END_TOKENS
    )
    return {token_id for token_id in ends if isinstance(token_id, int)}
