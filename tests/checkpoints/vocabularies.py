"""Tiny tokenizers: as GGUF metadata, and as a Hugging Face folder's files."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def byte_level_metadata(cut: str = "smollm") -> dict[str, Any]:
    """A byte-level vocabulary: three control tokens, 256 bytes, and a few merges (two digits merge, if they may)."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = ["a b", "ab a", "\u0120 ab", "1 2", "\u010a \u010a"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """A sentencepiece vocabulary with byte fallback: the better score merges first, so "abc" is "a" + "bc"."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scored = {SPACE: -9.0, "a": -5.0, "b": -6.0, "c": -7.0, "ab": -2.0, "bc": -1.0, SPACE + "a": -3.0}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *scored],
        "tokenizer.ggml.scores": [0.0] * len(pieces) + list(scored.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scored),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_tokenizer_folder(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json that name three different end tokens."""
    vocabulary = {token: index for index, token in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<stop>", "<|im_end|>", "<|im_start|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<stop>", "chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
