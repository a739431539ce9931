"""Compiles a decode step for an accelerator that is not there: python -m tests.kernels.decode_ahead_of_time TARGET.

TARGET is as in `ahead_of_time`. Prints the bytes of one pool of keys and those of the program's temporary memory.
"""

import sys
from unittest import mock

from tests.kernels.ahead_of_time import device_of  # isort: skip (sets the environment before JAX is imported)

import jax
import jax.numpy as jnp
from flax import nnx

import uniprefill_jax as up
from pallas_kernels.paged_attention import api
from uniprefill_jax.cache.pools import make_pools
from uniprefill_jax.engine.decode_steps import decode_step, empty_slots

SIZES = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 5,
}
PAGES, PAGE, SLOTS, MAX_PAGES = 1000, 64, 8, 64


def main(target: str) -> None:
    """Compile the step with the kernel in it."""
    device, platform, backend = device_of(target)
    llm = up.LLM.from_config(SIZES, dtype="bfloat16", seed=0)
    pools = jax.eval_shape(lambda: make_pools(llm.config, PAGES, PAGE, SLOTS, jnp.bfloat16))
    slots = jax.eval_shape(lambda: empty_slots(llm.config, SLOTS, MAX_PAGES, PAGES))
    commands = jax.ShapeDtypeStruct((SLOTS,), jnp.int32)
    new_pages = jax.ShapeDtypeStruct((SIZES["num_hidden_layers"], SLOTS), jnp.int32)
    graph = llm.programs.graph

    def step(parameters, *arguments):
        return decode_step(False, nnx.merge(graph, parameters), *arguments)

    arguments = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=device),
        (llm.programs.parameters, pools, slots, commands, new_pages),
    )
    with mock.patch.object(api, "choose_backend", lambda **_: backend):
        traced = jax.jit(step, donate_argnums=(1, 2)).trace(*arguments)
    program = traced.lower(lowering_platforms=(platform,)).compile()
    text = program.as_text()
    if text is None or not ("mosaic_gpu" in text or "tpu_custom_call" in text):
        raise SystemExit("compiled without the kernel")
    print(pools.keys.size * pools.keys.dtype.itemsize, program.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main(sys.argv[1])
