"""Nothing is ever NaN or Inf: 200 random small configurations, ragged lengths, all families and modes.

A pool of tiny models with a setting each; lengths, token ids, top_p and the memory's weight are drawn. What is drawn is
traced, so the pool compiles once. Packed sizes stay within one bucket.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import uniprefill_jax as up
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.parameters import parameter_specs

VOCABULARY = 61
_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
_LLAMA = _SHARED | {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2}
_GEMMA = _SHARED | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "sliding_window": 20,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
_QWEN = _SHARED | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
    ],
}
_SIZES = {"block_size": 16, "sink_tokens": 16, "window_tokens": 8}
_TINY = {"block_size": 16, "sink_tokens": 0, "window_tokens": 1}

_CANDIDATES = {"score": "peak", "top_p_over": "candidates"}
POOL = [
    (_LLAMA | {"num_key_value_heads": 1}, dict(drop_layers=(1, 2), dropped_tokens="carry", cut="below", **_SIZES)),
    (_LLAMA | {"tie_word_embeddings": True}, dict(drop_layers=(0, 1), score_memory=0.5, **_CANDIDATES, **_TINY)),
    (_GEMMA | {"sliding_window": 1}, dict(drop_layers=(1, 3), cut="below", top_p_over="candidates", **_SIZES)),
    (_GEMMA, dict(drop_layers=(1, 3), dropped_tokens="carry", sliding_window="kept", score="peak", **_TINY)),
    (_QWEN, dict(drop_layers=(1, 3), dropped_tokens="carry", score_memory=0.5, **_CANDIDATES, **_TINY)),
    (_QWEN | {"num_experts": 0}, dict(drop_layers=(1,), **_SIZES)),
]


@lru_cache
def model(number: int) -> up.LLM:
    """One of the pool, every parameter random, norms included (drawn by numpy: nothing to compile)."""
    random = np.random.default_rng(number)

    def parameters(causal_lm: CausalLM, _: object) -> dict[str, jax.Array]:
        specs = parameter_specs(causal_lm)
        return {path: jnp.asarray(random.normal(0, 0.3, spec.full_shape), jnp.float32) for path, spec in specs.items()}

    return up.LLM(POOL[number][0], parameters, "float32")


@st.composite
def batches(draw: st.DrawFn) -> list[int]:
    """Three or four lengths that fill more than 192 and at most 256 rows, the longest 129 to 192."""
    longest = draw(st.integers(129, 192))
    rest = draw(st.integers(193, 256)) - longest
    parts = min(draw(st.integers(2, 3)), rest)
    cuts: list[int] = []
    if parts > 1:
        cuts = draw(st.lists(st.integers(1, rest - 1), min_size=parts - 1, max_size=parts - 1, unique=True))
    others = np.diff([0, *sorted(cuts), rest]).tolist()
    return draw(st.permutations([longest, *others]))


@settings(max_examples=200)
@given(
    st.integers(0, len(POOL) - 1),
    batches(),
    st.integers(1, 100),
    st.integers(1, 99),
    st.integers(0, 2**31),
)
def test_everything_is_finite(number: int, lengths: list[int], percent: int, memory: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    few = random.integers(0, VOCABULARY, size=random.integers(1, 30))
    prompts = [random.choice(few, length).tolist() for length in lengths]
    setting = POOL[number][1]
    # Whether there is a memory at all is part of the program; its weight is not.
    weight = {"score_memory": memory / 100} if "score_memory" in setting else {}
    config = up.UniPrefillConfig(**(setting | {"top_p": percent / 100 - 1e-6} | weight))
    for length, result in zip(lengths, model(number).prefill(prompts, config), strict=True):
        assert np.isfinite(np.asarray(result.logits)).all()
        entered = length
        for layer in setting["drop_layers"]:
            kept, mass = np.asarray(result.kept_positions[layer]), np.asarray(result.block_mass[layer])
            assert np.isfinite(mass).all() and (mass >= 0).all()
            assert abs(mass.sum() - 1) <= 1e-4
            assert len(mass) == -(-entered // setting["block_size"])
            assert (np.diff(kept) > 0).all() and kept[0] >= 0 and kept[-1] == length - 1
            assert set(range(max(0, length - setting["window_tokens"]), length)) <= set(kept.tolist())
            assert not np.isnan(result.cut_margin[layer])
            entered = length if setting.get("dropped_tokens") == "carry" else len(kept)
        # Scoring is counted too: keeping everything costs a little more than dense.
        assert 0 < result.flop_fraction <= 1.2
        assert np.isfinite(list(np.ravel(list(result.discarded_mass.values())))).all()
