"""Conversion: any source to Orbax and back is bit-identical, with config and tokenizer; failures leave nothing."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints_convert
from checkpoints_convert import load_parameters, open_checkpoint
from tests.checkpoints.builders import GEMMA_CONFIG, LLAMA_CONFIG, model_tensors, write_folder, write_gguf
from tests.checkpoints.vocabularies import byte_level_metadata, write_tokenizer_folder
from uniprefill_jax.errors import CheckpointError, ConfigError, UniPrefillError
from uniprefill_jax.models.causal_lm import CausalLM, ignored_tensors
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import parameter_specs
from uniprefill_jax.tokenizer import load_tokenizer

QWEN3_NEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "vocab_size": 48,
}


def load(path: Path, dtype: str) -> dict[str, jax.Array]:
    """All parameters of a checkpoint."""
    source = open_checkpoint(path)
    config = read_model_config(source.config)
    specs = parameter_specs(CausalLM(config, jnp.dtype(dtype)))
    return load_parameters(source, specs, dtype=dtype, ignore=ignored_tensors(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next", "gguf"])
def test_loading_the_result_is_bit_identical(tmp_path: Path, kind: str, dtype: str):
    if kind == "gguf":
        source = write_gguf(
            tmp_path / "m.gguf", LLAMA_CONFIG, model_tensors(LLAMA_CONFIG), metadata=byte_level_metadata()
        )
    else:
        config = {"llama": LLAMA_CONFIG, "gemma3": GEMMA_CONFIG, "qwen3_next": QWEN3_NEXT_CONFIG}[kind]
        source = write_folder(tmp_path / "m", config, model_tensors(config, jnp.bfloat16), shards=2)
    checkpoints_convert.convert(source, tmp_path / "out", dtype)
    expected, converted = load(source, dtype), load(tmp_path / "out", dtype)
    assert set(expected) == set(converted)
    for path, array in expected.items():
        assert array.dtype == converted[path].dtype == jnp.dtype(dtype)
        assert np.asarray(array).tobytes() == np.asarray(converted[path]).tobytes(), path
    assert open_checkpoint(tmp_path / "out").config == open_checkpoint(source).config


def test_the_tokenizer_goes_along(tmp_path: Path):
    folder = write_folder(tmp_path / "m", LLAMA_CONFIG, model_tensors(LLAMA_CONFIG))
    write_tokenizer_folder(folder)
    checkpoints_convert.convert(folder, tmp_path / "out", "float32")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    before, after = load_tokenizer(open_checkpoint(folder)), load_tokenizer(open_checkpoint(tmp_path / "out"))
    assert before is not None and after is not None
    assert before.encode("ab ba") == after.encode("ab ba") and before.eos_token_ids == after.eos_token_ids


def test_progress_reaches_the_end(tmp_path: Path):
    folder = write_folder(tmp_path / "m", LLAMA_CONFIG, model_tensors(LLAMA_CONFIG))
    seen: list[tuple[int, int]] = []
    checkpoints_convert.convert(folder, tmp_path / "out", "float32", progress=lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1] > 0


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "rope_scaling": {"rope_type": "yarn"}}))


def break_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def break_name(folder: Path) -> None:
    (folder / "model.safetensors").write_text("not tensors at all")


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')


def break_size(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "num_hidden_layers": 3}))


@pytest.mark.parametrize("damage", [break_config, break_weights, break_name, break_tokenizer, break_size])
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, damage: Any):
    folder = write_folder(tmp_path / "m", LLAMA_CONFIG, model_tensors(LLAMA_CONFIG))
    damage(folder)
    with pytest.raises(ConfigError if damage is break_config else CheckpointError) as caught:
        checkpoints_convert.convert(folder, tmp_path / "out", "float32")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_existing_target_is_refused_before_anything_is_read(tmp_path: Path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UniPrefillError, match="exists already"):
        checkpoints_convert.convert(tmp_path / "missing", tmp_path / "out", "float32")


def test_public_names():
    for name in checkpoints_convert.__all__:
        assert getattr(checkpoints_convert, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = checkpoints_convert.nothing
