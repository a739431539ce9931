"""The ways to follow the number of kept rows agree: loops of chunks, a ladder of lengths, padding-free kernels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import uniprefill_jax as up
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.sparsify.drop_layers import auto_drop_layers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "llama": {"model_type": "llama", "num_hidden_layers": 17},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 9,
        "sliding_window": 48,
        "sliding_window_pattern": 2,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 9,
        "full_attention_interval": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
LENGTHS = (290, 1, 160)


@pytest.mark.parametrize(
    ("family", "mode", "lengths_by"),
    [
        ("llama", "discard", "ladder"),
        ("gemma3", "carry", "kernels"),
        ("qwen3_next", "discard", "kernels"),
        pytest.param("llama", "carry", "ladder", marks=pytest.mark.slow),
        pytest.param("llama", "carry", "kernels", marks=pytest.mark.slow),
        pytest.param("gemma3", "carry", "ladder", marks=pytest.mark.slow),
        pytest.param("gemma3", "discard", "ladder", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "discard", "ladder", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "carry", "kernels", marks=pytest.mark.slow),
    ],
)
def test_loops_equal(family, mode, lengths_by):
    llm = up.LLM.from_config(SIZES | MODELS[family], dtype="float32", seed=2)
    drop_layers = auto_drop_layers(llm.config)
    assert len(drop_layers) >= 2
    config = up.UniPrefillConfig(
        top_p=0.6, block_size=32, sink_tokens=32, window_tokens=16, dropped_tokens=mode, drop_layers=drop_layers
    )
    chunked, other = (
        PrefillPlan.for_batch(llm.config, config, drop_layers, LENGTHS, jnp.float32, by) for by in ("loops", lengths_by)
    )
    assert chunked.ladder == (chunked.num_rows,) and chunked.row_chunk is not None and other.row_chunk is None
    if lengths_by == "ladder":
        assert len(other.ladder) > 3
        other = replace(other, ladder=(256, 320, other.num_rows))
    else:
        assert other.ladder == (other.num_rows,) and other.execution.skip_padding
    tokens = np.zeros(chunked.num_rows, np.int32)
    tokens[: sum(LENGTHS)] = np.random.default_rng(0).integers(0, 96, sum(LENGTHS))
    cu_seqlens = np.cumsum([0, *LENGTHS, 0]).astype(np.int32)
    outputs = []
    for plan in (chunked, other):
        run, _ = llm.programs.prefill(plan, jnp.asarray(tokens), jnp.asarray(cu_seqlens))
        outputs.append(jax.device_get(run()))
    expected, found = outputs
    kept = expected.segments.cu_seqlens[:, -1]
    assert kept[-1] < kept[0], "nothing was dropped, so no rung but the last was tried"
    np.testing.assert_array_equal(found.segments.cu_seqlens, expected.segments.cu_seqlens)
    for segment, count in enumerate(kept):
        np.testing.assert_array_equal(
            found.segments.positions[segment, :count], expected.segments.positions[segment, :count]
        )
    error = np.linalg.norm(found.logits[:3] - expected.logits[:3]) / np.linalg.norm(expected.logits[:3])
    assert error <= 1e-5
    for cache in jax.tree.leaves(found.caches):
        assert np.isfinite(cache).all()
