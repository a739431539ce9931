"""Tiny models, prompts and settings that the engine's tests share, so that each program compiles once."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import uniprefill_jax as up
from tests.oracle.small_models import make_prompt
from uniprefill_jax.cache.pools import make_pools
from uniprefill_jax.engine.requests import Event

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "llama": {"model_type": "llama", "num_hidden_layers": 5},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 6,
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
DROP_LAYERS = (1, 3)
CONFIG = up.EngineConfig(page_size=16, pool_pages=400, max_running=4, prefill_chunk=64, max_length=256)
DROPPING = up.UniPrefillConfig(top_p=0.6, block_size=16, sink_tokens=16, window_tokens=16, drop_layers=DROP_LAYERS)


@cache
def tiny(family: str) -> up.LLM:
    """A tiny random model in float32."""
    return up.LLM.from_config(SIZES | MODELS[family], dtype="float32", seed=2)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids."""
    return make_prompt(SIZES["vocab_size"], length, seed).tolist()


def poisoned_engine(llm: up.LLM, config: up.EngineConfig = CONFIG) -> up.Engine:
    """An engine whose pools hold NaN at first, and whose pages hold NaN again once they are freed."""
    engine = up.Engine(llm, config)
    dtype = engine.executor.pools.keys.dtype
    engine.executor.pools = make_pools(
        llm.config, config.pool_pages, config.page_size, engine.executor.num_states, dtype, fill=float("nan")
    )

    def poison(ids: np.ndarray) -> None:
        padded = np.full(config.pool_pages, config.pool_pages, np.int32)
        padded[: len(ids)] = ids
        pools = engine.executor.pools
        keys, values = (_poison(pages, padded) for pages in (pools.keys, pools.values))
        engine.executor.pools = replace(pools, keys=keys, values=values)

    engine.scheduler.pages.on_free = poison
    return engine


@partial(jax.jit, donate_argnums=0)
def _poison(pages: jax.Array, ids: jax.Array) -> jax.Array:
    return pages.at[ids].set(jnp.nan, mode="drop")


def run(engine: up.Engine, events: list[Event] | None = None) -> dict[int, list[int]]:
    """Step until all requests have ended; the tokens of each."""
    tokens: dict[int, list[int]] = {}
    steps = 0
    while engine.has_work:
        for event in engine.step():
            if event.kind == "token":
                tokens.setdefault(event.request_id, []).append(event.token)
            if events is not None:
                events.append(event)
        steps += 1
        assert steps < 5000, "the engine makes no progress"
    assert_nothing_held(engine)
    return tokens


def assert_nothing_held(engine: up.Engine) -> None:
    """No page, promise or slot is held, and nothing of a request's prefill is left on the device."""
    stats = engine.stats()
    held = (stats.pages_in_use, stats.pages_reserved, stats.slots_in_use)
    assert held == (0, 0, 0) and (stats.waiting, stats.prefilling, stats.running) == (0, 0, 0)
    assert not engine.executor._rows
