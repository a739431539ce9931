"""Tokenizers: ids equal the originals', from GGUF metadata as from a folder; streams add up to the whole text."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_convert import find_packaged, open_checkpoint
from tests.checkpoints.builders import GEMMA_CONFIG, LLAMA_CONFIG, model_tensors, write_folder, write_gguf
from tests.checkpoints.vocabularies import (
    SPACE,
    byte_level_metadata,
    sentencepiece_metadata,
    write_tokenizer_folder,
)
from uniprefill_jax.errors import CheckpointError, InputError
from uniprefill_jax.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

# Gemma's ids are those of the published tokenizer.json. SmolLM2's equal transformers' reading of the GGUF file but for
# numbers after white space, which transformers does not split off as the published tokenizer does.
TOKEN_IDS = json.loads((Path(__file__).parent / "data" / "token_ids.json").read_text())


def from_metadata(folder: Path, metadata: dict[str, Any], config: dict[str, Any] = LLAMA_CONFIG) -> Tokenizer:
    """The tokenizer of a small GGUF file."""
    source = open_checkpoint(write_gguf(folder / "m.gguf", config, model_tensors(config), metadata=metadata))
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma-3-270m"])
def packaged(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    """A packaged model's name and tokenizer."""
    path = find_packaged(request.param)
    assert path is not None
    tokenizer = load_tokenizer(open_checkpoint(path))
    assert tokenizer is not None
    return request.param, tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tiny tokenizers of both kinds."""
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "bytes": from_metadata(folder, byte_level_metadata()),
        "pieces": from_metadata(folder, sentencepiece_metadata()),
    }


def test_packaged_ids_equal_the_originals(packaged: tuple[str, Tokenizer]):
    name, tokenizer = packaged
    for text, ids in zip(TOKEN_IDS["texts"], TOKEN_IDS[name], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_packaged_texts_survive_and_stream(packaged: tuple[str, Tokenizer]):
    name, tokenizer = packaged
    for text in TOKEN_IDS["texts"]:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<bos>")
        assert whole == (text if name == "smollm2-135m" else text.replace(SPACE, " "))
        stream = StreamDecoder(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids), text


def test_packaged_facts(packaged: tuple[str, Tokenizer]):
    name, tokenizer = packaged
    if name == "smollm2-135m":
        assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.has_chat_template) == (49152, (0, 2), True)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\n") and ids.count(1) == 3
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    else:
        assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.has_chat_template) == (262144, (1, 106), False)
        assert tokenizer.encode("x")[0] == 2 and tokenizer.encode("x", add_special_tokens=False)[0] != 2
        with pytest.raises(InputError, match="no chat template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_no_torch_is_needed(packaged: tuple[str, Tokenizer]):
    assert "transformers" in sys.modules and "torch" not in sys.modules


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["bytes", "pieces"]), text=st.text(max_size=30) | st.text("ab 12\n<|>im_endé", max_size=20))
def test_any_text_survives_and_streams(tiny: dict[str, Tokenizer], kind: str, text: str):
    tokenizer = tiny[kind]
    ids = tokenizer.encode(text)
    if kind == "bytes":
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 262), max_size=20), skip=st.booleans())
def test_any_ids_stream(tiny: dict[str, Tokenizer], ids: list[int], skip: bool):
    stream = StreamDecoder(tiny["bytes"], skip)
    assert "".join(map(stream.push, ids)) + stream.finish() == tiny["bytes"].decode(ids, skip)


def test_a_character_is_held_back_until_it_is_whole(tiny: dict[str, Tokenizer]):
    stream = StreamDecoder(tiny["bytes"])
    pieces = [stream.push(token_id) for token_id in tiny["bytes"].encode("a\N{PARTY POPPER}b")]
    assert pieces == ["a", "", "", "", "\N{PARTY POPPER}", "b"] and stream.finish() == ""


@pytest.mark.parametrize(
    ("cut", "count"),
    [("smollm", 3), ("gpt-2", 3), ("default", 3), ("llama-bpe", 3)],
)
def test_how_text_is_cut(tmp_path: Path, cut: str, count: int):
    tokenizer = from_metadata(tmp_path, byte_level_metadata(cut))
    merged = tokenizer.encode("12", add_special_tokens=False)
    assert len(merged) == (2 if cut == "smollm" else 1)  # only SmolLM keeps digits apart
    begins = tokenizer.encode("aba")[0] == 1
    assert begins == (cut == "llama-bpe")  # llama.cpp's defaults
    assert len(tokenizer.encode("aba ab", add_special_tokens=False)) == count - 1


def test_begin_and_end_follow_the_file(tmp_path: Path):
    metadata = {**byte_level_metadata(), "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = from_metadata(tmp_path, metadata)
    ids = tokenizer.encode("ab")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)


def test_sentencepiece_merges_by_score(tiny: dict[str, Tokenizer], tmp_path: Path):
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]

    def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
        return [tokens[token_id] for token_id in tokenizer.encode(text)]

    assert pieces(tiny["pieces"], "abc") == ["<s>", SPACE + "a", "bc"]
    assert pieces(tiny["pieces"], "z") == ["<s>", SPACE, "<0x7A>"]
    assert tiny["pieces"].decode(tiny["pieces"].encode("abc z")) == "abc z"
    plain = from_metadata(tmp_path, {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": False})
    assert pieces(plain, "abc") == ["<s>", "a", "bc"]


def test_tokenizers_that_are_not_supported(tmp_path: Path):
    with pytest.raises(CheckpointError, match="tokenizer model 't5' is not supported"):
        from_metadata(tmp_path, {**byte_level_metadata(), "tokenizer.ggml.model": "t5"})
    with pytest.raises(CheckpointError, match="pre-tokenizer 'viking' is not supported"):
        from_metadata(tmp_path, byte_level_metadata("viking"))
    with pytest.raises(CheckpointError, match="its tokenizer cannot be built"):
        from_metadata(tmp_path, {**byte_level_metadata(), "tokenizer.ggml.merges": ["no such", "tokens here"]})
    with pytest.raises(CheckpointError, match="bos_token_id is 9999, the vocabulary has 264 tokens"):
        from_metadata(tmp_path, {**byte_level_metadata(), "tokenizer.ggml.bos_token_id": 9999})


def test_a_gguf_file_without_a_vocabulary(tmp_path: Path):
    source = open_checkpoint(write_gguf(tmp_path / "m.gguf", GEMMA_CONFIG, model_tensors(GEMMA_CONFIG)))
    assert load_tokenizer(source) is None


def test_saved_tokenizers_load_the_same(tiny: dict[str, Tokenizer], tmp_path: Path):
    for kind, tokenizer in tiny.items():
        folder = write_folder(tmp_path / kind, LLAMA_CONFIG, model_tensors(LLAMA_CONFIG))
        tokenizer.save(folder)
        again = load_tokenizer(open_checkpoint(folder))
        assert again is not None
        for text in ("ab aba 12\n\n", "", " \N{PARTY POPPER} <|im_end|>x"):
            assert again.encode(text) == tokenizer.encode(text)
            assert again.decode(again.encode(text)) == tokenizer.decode(again.encode(text))
        assert again.eos_token_ids == tokenizer.eos_token_ids
        assert again.has_chat_template == tokenizer.has_chat_template
        if again.has_chat_template:
            messages = [{"role": "user", "content": "ab"}]
            assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a tokenizer."""
    folder = write_folder(tmp_path / "m", LLAMA_CONFIG, model_tensors(LLAMA_CONFIG))
    write_tokenizer_folder(folder)
    return folder


def test_end_tokens_are_gathered_from_all_files(folder: Path):
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer is not None
    # config.json says 2, generation_config.json 5 and 7, the tokenizer <stop>, and <|im_end|> ends turns everywhere.
    assert tokenizer.eos_token_ids == (2, 5, 7, 256, 257)


def test_chat_template_of_a_folder(folder: Path):
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer is not None
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>ab<|im_end|>"
    with pytest.raises(InputError, match="refuses these messages: no critics"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "ab"}])


def test_damaged_tokenizer_files(folder: Path):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="its tokenizer files cannot be read"):
        load_tokenizer(open_checkpoint(folder))
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(open_checkpoint(folder)) is None


def test_long_texts_are_encoded_in_silence(tiny: dict[str, Tokenizer], capfd: pytest.CaptureFixture[str]):
    assert len(tiny["bytes"].encode("ba" * 1000)) > LLAMA_CONFIG["max_position_embeddings"]
    assert capfd.readouterr() == ("", "")


def test_ids_beyond_the_vocabulary_have_no_text(tiny: dict[str, Tokenizer]):
    assert tiny["bytes"].decode([3, 100_000, 4]) == tiny["bytes"].decode([3, 4])


def test_negative_ids_are_refused(tiny: dict[str, Tokenizer]):
    with pytest.raises(InputError, match="token id -1 is negative"):
        tiny["bytes"].decode([-1])


@pytest.mark.parametrize("text", ["  naïve 日本語 🙂🙃 x", "a b  c", "\tÿ\n"])
def test_bytes_of_tokens_add_up(packaged: tuple[str, Tokenizer], text: str):
    _, tokenizer = packaged
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert all(len(tokenizer.token_bytes(token)) <= tokenizer.longest_token for token in ids)
    assert tokenizer.token_bytes(tokenizer.vocab_size + 1000) == b""


def test_bytes_of_sentencepiece_tokens(tmp_path: Path):
    tokenizer = from_metadata(tmp_path, sentencepiece_metadata())
    ids = tokenizer.encode("ab a é", add_special_tokens=False)
    # This kind of tokenizer puts a space before the text.
    assert b"".join(map(tokenizer.token_bytes, ids)) == " ab a é".encode()
