"""GGUF: tensors, names and config equal the Hugging Face model that was converted; damage is one clear line."""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_convert import CheckpointSource, find_packaged, open_checkpoint
from checkpoints_convert.gguf_file import GgufFile
from tests.checkpoints.builders import GEMMA_CONFIG, LLAMA_CONFIG, model_tensors, write_gguf
from uniprefill_jax.errors import CheckpointError, ConfigError
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.rope import inverse_frequencies

DATA = Path(__file__).parent / "data"
PUBLISHED = Path(__file__).parents[1] / "data" / "published_configs.json"
CONFIGS = {"llama": LLAMA_CONFIG, "gemma3": GEMMA_CONFIG}
F32 = gguf.GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One float32 GGUF file per architecture."""
    folder = tmp_path_factory.mktemp("gguf")
    return {
        name: write_gguf(folder / f"{name}.gguf", config, model_tensors(config)) for name, config in CONFIGS.items()
    }


def refusal(path: Path) -> str:
    """The message with which a file is refused; it is one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def opened(tmp_path: Path, config: dict[str, Any], metadata: dict[str, Any], **options: Any) -> CheckpointSource:
    """A small model's file with other metadata, opened."""
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", config, model_tensors(config), metadata=metadata, **options))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_tensors_are_those_of_the_hugging_face_model(files: dict[str, Path], architecture: str):
    source = open_checkpoint(files[architecture])
    expected = model_tensors(CONFIGS[architecture])
    assert source.kind == "gguf" and set(source.tensors) == set(expected)
    for name, array in expected.items():
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1) - np.float32(1)  # what is left of it after the trip
        assert source.tensors[name].shape == array.shape and source.tensors[name].dtype == np.float32
        np.testing.assert_array_equal(source.read(name), array, err_msg=name)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_config_describes_the_same_model(files: dict[str, Path], architecture: str):
    source = open_checkpoint(files[architecture])
    assert read_model_config(source.config) == read_model_config(CONFIGS[architecture])
    assert source.config["eos_token_id"] == [CONFIGS[architecture]["eos_token_id"]]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_storage_types(tmp_path: Path, kind: str):
    tensors = model_tensors(LLAMA_CONFIG)
    name = "model.layers.1.self_attn.k_proj.weight"
    storage = gguf.GGMLQuantizationType[kind]
    source = open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA_CONFIG, tensors, kinds={name: storage}))
    expected = gguf.dequantize(gguf.quantize(tensors[name], storage), storage)
    np.testing.assert_array_equal(source.read(name), expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slices_equal_the_whole(files: dict[str, Path], data: st.DataObject):
    source = open_checkpoint(files[data.draw(st.sampled_from(list(CONFIGS)))])
    name = data.draw(st.sampled_from(sorted(source.tensors)))
    parts = []
    for size in source.tensors[name].shape[: data.draw(st.integers(0, 2))]:
        start = data.draw(st.integers(0, size))
        parts.append(slice(start, data.draw(st.integers(start, size))))
    np.testing.assert_array_equal(source.read(name, tuple(parts)), source.read(name)[tuple(parts)])


def test_llama3_scaling_is_recovered_from_the_frequency_factors(tmp_path: Path):
    published = read_model_config(json.loads(PUBLISHED.read_text())["llama-3.1-8b"])
    rope = published.layers[0].rope
    assert rope is not None
    plain = rope.theta ** (-np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    factors = (plain / inverse_frequencies(rope)).astype(np.float32)
    config = {**LLAMA_CONFIG, "head_dim": rope.rotary_dim, "rope_theta": rope.theta}
    source = opened(tmp_path, config, {}, extra={"rope_freqs.weight": factors})
    assert read_model_config(source.config).layers[0].rope == rope
    assert "rope_freqs.weight" not in source.tensors


def test_frequency_factors_of_another_form_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="not Llama-3.1's"):
        opened(tmp_path, LLAMA_CONFIG, {}, extra={"rope_freqs.weight": np.array([1, 3, 2, 7], np.float32)})


def test_gemma_linear_scaling_is_for_global_layers(tmp_path: Path):
    metadata = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    layers = read_model_config(opened(tmp_path, GEMMA_CONFIG, metadata).config).layers
    by_kind = {layer.mixer: layer.rope for layer in layers}
    assert by_kind["full"] is not None and by_kind["sliding"] is not None
    assert (by_kind["full"].scaling, by_kind["full"].factor, by_kind["full"].theta) == ("linear", 8.0, 1e6)
    assert (by_kind["sliding"].scaling, by_kind["sliding"].theta) == ("default", 1e4)
    assert [layer.mixer for layer in layers] == ["sliding"] * 5 + ["full", "sliding"]


def test_gemma_27b_scales_by_width_per_head(tmp_path: Path):
    config = {**GEMMA_CONFIG, "num_hidden_layers": 62, "hidden_size": 64, "query_pre_attn_scalar": 16, "head_dim": 8}
    assert opened(tmp_path, config, {}).config["query_pre_attn_scalar"] == 64 // config["num_attention_heads"]
    config["num_hidden_layers"] = 6
    assert opened(tmp_path, config, {}).config["query_pre_attn_scalar"] == config["head_dim"]


def test_end_tokens_come_from_ids_and_names(tmp_path: Path):
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 4],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.bos_token_id": 0,
    }
    config = opened(tmp_path, LLAMA_CONFIG, metadata).config
    assert config["eos_token_id"] == [1, 2, 3] and config["bos_token_id"] == 0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported are llama, gemma3"),
        ({"split.count": 3}, "is one of 3 parts"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.context_length": None}, "lacks llama.context_length"),
        ({"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, "partial rotation"),
        ({"llama.attention.value_length": 4}, "must be equal"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
    ],
)
def test_models_that_are_not_supported(tmp_path: Path, metadata: dict[str, Any], message: str):
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, LLAMA_CONFIG, metadata)
    assert message in str(caught.value)


def test_rope_types_are_left_to_the_config_reader(tmp_path: Path):
    source = opened(tmp_path, LLAMA_CONFIG, {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0})
    with pytest.raises(ConfigError, match="yarn"):
        read_model_config(source.config)


def test_tensors_of_another_model_are_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a"):
        opened(tmp_path, LLAMA_CONFIG, {}, extra={"blk.0.ssm_a": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        opened(tmp_path, GEMMA_CONFIG, {}, extra={"rope_freqs.weight": np.ones(4, np.float32)})


def test_a_file_without_an_embedding(tmp_path: Path):
    tensors = model_tensors(LLAMA_CONFIG)
    del tensors["model.embed_tokens.weight"]
    assert "no token_embd.weight" in refusal(write_gguf(tmp_path / "m.gguf", LLAMA_CONFIG, tensors))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"plain text, long enough to be a header", "starts with b'plai'"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), "version 50331648"),
        (b"GGUF" + (3).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little") + bytes(40), "corrupt"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1 << 40).to_bytes(8, "little") + bytes(40), "corrupt"),
    ],
)
def test_files_that_are_not_gguf(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert message in refusal(path)


def test_a_file_cut_in_half(files: dict[str, Path], tmp_path: Path):
    whole = files["llama"].read_bytes()
    path = tmp_path / "half.gguf"
    path.write_bytes(whole[: len(whole) // 2])
    assert "cut short" in refusal(path)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(
    files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    whole = files["gemma3"].read_bytes()
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    end = len(whole) - gguf.GGUF_DEFAULT_ALIGNMENT  # behind that, only padding may be lost
    path.write_bytes(whole[: data.draw(st.integers(0, end) | st.integers(0, 3000))])
    assert str(path) in refusal(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_raise_anything_else(
    files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    whole = bytearray(files["llama"].read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / "m.gguf"
    path.write_bytes(whole)
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        assert "\n" not in str(error)


def test_a_file_that_shrinks_after_opening(files: dict[str, Path], tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(files["llama"].read_bytes())
    source = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="when it was opened"):
        source.read("model.norm.weight")


def test_metadata_equals_what_the_gguf_package_reads(files: dict[str, Path]):
    ours = GgufFile(files["gemma3"])
    theirs = gguf.GGUFReader(files["gemma3"])
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert {name: tensor.offset for name, tensor in ours.tensors.items()} == {
        tensor.name: tensor.data_offset for tensor in theirs.tensors
    }


def test_a_folder_with_one_gguf_file(files: dict[str, Path], tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(files["llama"].read_bytes())
    assert open_checkpoint(tmp_path).kind == "gguf"
    (tmp_path / "n.gguf").write_bytes(files["llama"].read_bytes())
    assert "2 .gguf files" in refusal(tmp_path)


@pytest.mark.parametrize("alias", ["smollm2-135m", "gemma-3-270m"])
def test_packaged_weights_equal_those_that_transformers_loads(alias: str):
    # Checksums of the float32 state dict that transformers 5.17 makes of the same file.
    expected = json.loads((DATA / "dequantised_crc32.json").read_text())[alias]
    path = find_packaged(alias)
    assert path is not None
    source = open_checkpoint(path)
    assert set(source.tensors) == set(expected)
    for name, info in source.tensors.items():
        checksum = 0
        rows = info.shape[0]
        step = max(1, rows // math.ceil(info.nbytes / (1 << 26)))
        for start in range(0, rows, step):
            checksum = zlib.crc32(source.read(name, (slice(start, min(start + step, rows)),)), checksum)
        assert checksum == expected[name], name
