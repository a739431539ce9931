"""Wrong inputs raise typed one-line errors that name the offending value."""

import numpy as np
import pytest

import uniprefill_jax as up
from tests.oracle.small_models import SMALL_MODELS
from uniprefill_jax.errors import ConfigError, InputError, UniPrefillError

DENSE = up.UniPrefillConfig.dense()


@pytest.fixture(scope="module")
def llm() -> up.LLM:
    return up.LLM.from_config(SMALL_MODELS["gemma-irregular"].config, dtype="float32", seed=0)


def assert_names(error: pytest.ExceptionInfo[UniPrefillError], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message.strip()
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("prompts", "parts"),
    [
        ([[]], ["empty"]),
        ([[1, 2], []], ["empty", "1"]),
        ([], []),
        ([[1] * 4097], ["4097", "4096"]),
        ([[1, 2, 257]], ["257"]),
        ([[1, -1, 2]], ["-1"]),
        ([[1, 2.5]], ["2.5"]),
        ([np.ones((2, 2), np.int64)], []),
    ],
    ids=["empty", "second empty", "no prompts", "too long", "beyond vocabulary", "negative", "fraction", "matrix"],
)
def test_prompts_that_cannot_be_used(llm: up.LLM, prompts, parts) -> None:
    with pytest.raises(InputError) as error:
        llm.prefill(prompts, DENSE)
    assert_names(error, *parts)


def test_a_prompt_that_fills_the_model_does_not_cut_its_neighbours_short(llm: up.LLM) -> None:
    full, short = llm.generate([[1] * 4096, [1, 2, 3]], DENSE, up.SamplingConfig(max_tokens=8, ignore_eos=True))
    assert full.finish_reason == short.finish_reason == "length"
    assert len(full.token_ids) == 1
    assert len(short.token_ids) == 8


@pytest.mark.parametrize("layer", [0, 3, 8, 99])
def test_drop_layers_without_full_attention(llm: up.LLM, layer: int) -> None:
    with pytest.raises(ConfigError) as error:
        llm.prefill([[1, 2, 3]], up.UniPrefillConfig(drop_layers=(layer,)))
    # The possible ones are named: full attention, and not the last layer.
    assert_names(error, str(layer), "1", "4", "5")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_p", "0.9"),
        ("block_size", 0),
        ("block_size", -64),
        ("block_size", 24),
        ("sink_tokens", -1),
        ("sink_tokens", 100),
        ("window_tokens", 0),
        ("window_tokens", 2.5),
        ("drop_layers", "some"),
        ("drop_layers", (-1,)),
        ("drop_layers", (3, 3)),
        ("drop_layers", (5, 3)),
        ("dropped_tokens", "forget"),
        ("sliding_window", "tokens"),
        ("cut", "above"),
        ("score", "median"),
        ("score_memory", 1.0),
        ("score_memory", -0.1),
        ("top_p_over", "some"),
    ],
)
def test_settings_that_cannot_be_used(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        up.UniPrefillConfig(**{setting: value})
    assert_names(error, setting, str(value) if not isinstance(value, tuple) else str(value[0]))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("seed", -1),
        ("stop", ("",)),
    ],
)
def test_sampling_that_cannot_be_used(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        up.SamplingConfig(**{setting: value})
    assert_names(error, setting)


def test_block_functions_refuse_arrays_that_do_not_fit() -> None:
    random = np.random.default_rng(0)
    queries = random.normal(size=(8, 4, 16)).astype(np.float32)
    keys = random.normal(size=(100, 2, 16)).astype(np.float32)
    with pytest.raises(InputError):
        up.score_blocks(queries, keys[:, :, :8], 100)
    with pytest.raises(InputError):
        up.score_blocks(queries, keys, 101)
    with pytest.raises(InputError):
        up.score_blocks(queries[:, :3], keys, 100)
    for block_size in (0, -64):
        with pytest.raises(InputError) as error:
            up.score_blocks(queries, keys, 100, block_size=block_size)
        assert_names(error, "block_size", str(block_size))
    with pytest.raises(InputError):
        up.select_tokens(np.ones(1, np.float32), 100, up.UniPrefillConfig())
