"""The tokenizer that a GGUF file's metadata describes, rebuilt as its Hugging Face original.

transformers' own conversion is not used: up to 5.17 it turns Gemma's merges into a unigram model, which cuts words
differently ("wor" + "ld"), and swaps Llama's special tokens; later versions need torch to read the file.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from checkpoints_convert.gguf_config import CONTROL, USER_DEFINED
from uniprefill_jax.errors import CheckpointError

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's spelling of a space
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before merging, by tokenizer.ggml.pre; published tokenizer.json files of these models say the same.
_GPT2_CUTS = ("default", "gpt-2")
_LLAMA3_CUTS = ("llama-bpe", "llama3", "llama-v3")
_DIGIT_CUTS = ("smollm",)


def build_tokenizer(path: Path, architecture: str, metadata: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer of a GGUF file (`path` is named in errors), or None if the file holds no vocabulary.

    Raises CheckpointError for a tokenizer model or a pre-tokenizer that is not known.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    model = metadata.get("tokenizer.ggml.model")
    if tokens is None or model is None:
        return None
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if model == "gpt2":
        tokenizer = _byte_level(path, tokens, metadata)
    elif model == "llama" and architecture.startswith("gemma"):
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        tokenizer = _gemma(tokens, kinds, metadata)
    elif model == "llama":
        tokenizer = _sentencepiece(tokens, metadata)
    else:
        raise CheckpointError(f"{path}: tokenizer model {model!r} is not supported; supported are gpt2 and llama")
    tokenizer.add_special_tokens(_added(tokens, kinds, CONTROL))
    tokenizer.add_tokens(_added(tokens, kinds, USER_DEFINED))
    _add_begin_and_end(tokenizer, tokens, metadata)
    return tokenizer


def _added(tokens: list[str], kinds: list[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, found in zip(tokens, kinds, strict=True)
        if found == kind
    ]


def _byte_level(path: Path, tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    cut = metadata.get("tokenizer.ggml.pre", "default")
    if cut in _GPT2_CUTS:
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif cut in _DIGIT_CUTS:
        splitter = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif cut in _LLAMA3_CUTS:
        splitter = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join(_GPT2_CUTS + _DIGIT_CUTS + _LLAMA3_CUTS)
        raise CheckpointError(f"{path}: pre-tokenizer {cut!r} is not supported; supported are {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(BPE(_vocabulary(tokens), merges, ignore_merges=cut in _LLAMA3_CUTS))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma(tokens: list[str], kinds: list[int], metadata: dict[str, Any]) -> Tokenizer:
    # llama.cpp overwrites the scores of user-defined tokens, among them runs of spaces, tabs and newlines. In the
    # original these merge first, longest parts first; other tokens merge in the order of the vocabulary.
    scores = [
        1.0 if kind == USER_DEFINED and len(set(token)) == 1 else -float(index)
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    ]
    tokenizer = _merging(tokens, scores, metadata)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _sentencepiece(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = _merging(tokens, metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens)), metadata)
    spelling = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        tokenizer.decoder = decoders.Sequence([*spelling, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.decoder = decoders.Sequence(spelling)
    return tokenizer


def _merging(tokens: list[str], scores: list[float], metadata: dict[str, Any]) -> Tokenizer:
    """Byte-pair merging over a sentencepiece vocabulary: any two tokens that make a third merge, best score first."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    vocabulary = _vocabulary(tokens)
    found = []
    for token, index in vocabulary.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found += [(index, left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
    found.sort(key=lambda pair: (-scores[pair[0]], -len(pair[1]), -len(pair[2])))
    return Tokenizer(
        BPE(
            vocabulary,
            [(left, right) for _, left, right in found],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _add_begin_and_end(tokenizer: Tokenizer, tokens: list[str], metadata: dict[str, Any]) -> None:
    """Whether encoding adds the begin and end tokens; where the file does not say, llama.cpp's defaults."""
    begins_by_default = (
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_CUTS
    )
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    end = metadata.get("tokenizer.ggml.eos_token_id")
    template, special = ["$A"], []
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", begins_by_default):
        template.insert(0, tokens[begin])
        special.append((tokens[begin], begin))
    if end is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        template.append(tokens[end])
        special.append((tokens[end], end))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=None, special_tokens=list(dict.fromkeys(special))
        )
