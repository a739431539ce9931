"""Compiled programs of one model: ahead-of-time compilation, kept by plan, with the compile time known apart."""

import hashlib
import platform
import time
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.decode import (
    Continuation,
    DecodePlan,
    DecodeRun,
    decode_until,
    start_decode,
    start_run,
)
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.parallel.mesh import replicate
from uniprefill_jax.parallel.rules import ShardingRules
from uniprefill_jax.prefill import LayerCaches, PrefillOutput, SegmentRows, prefill
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.sampling import SamplingKind, SamplingNumbers, sample

CACHE_FOLDER = Path("~/.cache/uniprefill-jax/compiled")


def use_persistent_cache() -> None:
    """Keep compiled programs on disk between processes, unless jax was already told where to."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = CACHE_FOLDER.expanduser() / jax.default_backend()
        if jax.default_backend() == "cpu":
            # XLA's CPU programs use what the processor has: one folder per kind, should a home be shared by machines.
            folder = folder / _processor()
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _processor() -> str:
    try:
        described = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        described = platform.processor()
    return hashlib.sha256(described.encode()).hexdigest()[:16]


class Programs:
    """Builds and keeps the programs of one model; every call returns (result of running, seconds spent compiling).

    With `rules` they run on the mesh of the rules, where `parameters` must lie; without, on the default device.
    """

    def __init__(self, model: CausalLM, parameters: nnx.State, dtype: jnp.dtype, rules: ShardingRules | None = None):
        self.graph, _ = nnx.split(model)
        self.parameters = parameters
        self.rules = rules
        # Float32 means float32: accelerators would otherwise multiply in tf32 or bfloat16.
        self.precision = "highest" if dtype == jnp.float32 else "default"
        self.compiled: dict[Hashable, Callable[..., Any]] = {}

    def put(self, arrays: Any) -> Any:
        """Inputs of the programs (a pytree), on every device that they run on."""
        mesh = None if self.rules is None else self.rules.mesh
        return jax.tree.map(lambda array: replicate(np.asarray(array), mesh), arrays)

    def prefill(
        self, plan: PrefillPlan, tokens: jax.Array, cu_seqlens: jax.Array
    ) -> tuple[Callable[[], PrefillOutput], float]:
        """A prefill ready to run on these inputs, and the time it took to compile."""
        numbers = self.put((np.float32(plan.config.top_p), np.float32(plan.config.score_memory)))
        inputs = (tokens, cu_seqlens, *numbers)
        program, seconds = self.compile_prefill(plan, *inputs)
        return partial(program, self.parameters, *inputs), seconds

    def compile_prefill(self, plan: PrefillPlan, *inputs: Any) -> tuple[Callable[..., PrefillOutput], float]:
        """The program of a plan, a function of the parameters and of inputs like these.

        Like `compile_decode` it takes shapes and shardings (`jax.ShapeDtypeStruct`) as well as arrays: parameters and
        mesh may be of devices that are not there.
        """
        if self.rules is not None and plan.execution.skip_padding:
            raise ConfigError('products that leave out padding rows run on one device; plan with lengths_by="ladder"')
        key = _traced_out(plan)
        function = partial(_prefill, self.graph, key, self.rules)
        return self._program(key, function, (self.parameters, *inputs))

    def start_decode(
        self, plan: DecodePlan, output: PrefillOutput, first: jax.Array, ended: jax.Array
    ) -> tuple[DecodeRun, float]:
        """A run that begins with the `first` tokens after the prompts, of requests some of which may have `ended`."""
        key = ("start_decode", plan, first.shape, _shapes(output.caches))
        arguments = (output.caches, first, ended)
        program, seconds = self._program(key, partial(_start_decode, plan, self.rules), arguments)
        return program(*arguments), seconds

    def decode(
        self,
        plan: DecodePlan,
        kind: SamplingKind,
        numbers: SamplingNumbers,
        caches: LayerCaches,
        segments: SegmentRows,
        continuation: Continuation,
        run: DecodeRun,
        stop: jax.Array,
    ) -> tuple[DecodeRun, float]:
        """The run when token `stop` is known or every request has ended. `run` is consumed."""
        inputs = (caches, segments, run, numbers, continuation, stop)
        program, seconds = self.compile_decode(plan, kind, *inputs)
        return program(self.parameters, *inputs), seconds

    def compile_decode(self, plan: DecodePlan, kind: SamplingKind, *inputs: Any) -> tuple[Callable[..., Any], float]:
        """The program of `decode`, a function of the parameters and of inputs like these."""
        key = ("decode", plan, kind, _shapes(inputs))
        function = partial(_decode, self.graph, plan, kind, self.rules)
        return self._program(key, function, (self.parameters, *inputs), donate=(3,))

    def sample(self, kind: SamplingKind, numbers: SamplingNumbers, logits: jax.Array) -> tuple[jax.Array, float]:
        """The first token, from the prefill's logits."""
        arguments = (logits, numbers)
        function = partial(_sample_first, kind, self.rules)
        program, seconds = self._program(("sample", kind, logits.shape), function, arguments)
        return program(*arguments), seconds

    def _program(
        self, key: Hashable, function: Callable[..., Any], arguments: tuple[Any, ...], donate: tuple[int, ...] = ()
    ) -> tuple[Callable[..., Any], float]:
        if key in self.compiled:
            return self.compiled[key], 0.0
        start = time.perf_counter()
        # The mesh in force while a program is traced decides what runs per shard (parallel/shards.py).
        mesh = nullcontext() if self.rules is None else jax.set_mesh(self.rules.mesh)
        with jax.default_matmul_precision(self.precision), mesh:
            program = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
        self.compiled[key] = program
        return program, time.perf_counter() - start


def _prefill(
    graph: nnx.GraphDef, plan: PrefillPlan, rules: ShardingRules | None, parameters: nnx.State, *inputs: jax.Array
) -> PrefillOutput:
    output = prefill(plan, nnx.merge(graph, parameters), *inputs)
    if rules is None:
        return output
    # The host reads all but the caches, and decode programs take the caches of any prefill.
    logits, caches = rules.constrain_logits(output.logits), rules.constrain_caches(output.caches)
    return rules.constrain_replicated(output._replace(caches={}))._replace(logits=logits, caches=caches)


def _start_decode(
    plan: DecodePlan, rules: ShardingRules | None, caches: LayerCaches, first: jax.Array, ended: jax.Array
) -> DecodeRun:
    return _placed(start_run(start_decode(plan, caches, first.shape[0]), plan, first, ended), rules)


def _decode(
    graph: nnx.GraphDef,
    plan: DecodePlan,
    kind: SamplingKind,
    rules: ShardingRules | None,
    parameters: nnx.State,
    caches: LayerCaches,
    segments: SegmentRows,
    run: DecodeRun,
    numbers: SamplingNumbers,
    continuation: Continuation,
    stop: jax.Array,
) -> DecodeRun:
    def draw(logits: jax.Array, number: jax.Array) -> jax.Array:
        return _sample(kind, rules, logits, numbers, number)

    model = nnx.merge(graph, parameters)
    return _placed(decode_until(plan, model, caches, segments, continuation, draw, run, stop), rules)


def _sample_first(
    kind: SamplingKind, rules: ShardingRules | None, logits: jax.Array, numbers: SamplingNumbers
) -> jax.Array:
    return _sample(kind, rules, logits, numbers, jnp.zeros((), jnp.int32))


def _sample(
    kind: SamplingKind, rules: ShardingRules | None, logits: jax.Array, numbers: SamplingNumbers, step: jax.Array
) -> jax.Array:
    if rules is None:
        return sample(logits, kind, numbers, step)
    # Every shard draws from all logits.
    return rules.constrain_replicated(sample(rules.constrain_logits(logits), kind, numbers, step))


def _placed(run: DecodeRun, rules: ShardingRules | None) -> DecodeRun:
    if rules is None:
        return run
    caches = rules.constrain_caches(run.state.caches)
    whole = rules.constrain_replicated(replace(run, state=replace(run.state, caches={})))
    return replace(whole, state=replace(whole.state, caches=caches))


def _shapes(arrays: Any) -> Hashable:
    """What of a pytree of arrays decides the program: its structure and the arrays' shapes."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure, tuple(leaf.shape for leaf in leaves)


def _traced_out(plan: PrefillPlan) -> PrefillPlan:
    """The plan with everything that is traced, or that a dense prefill does not read, set to one value."""
    fixed = UniPrefillConfig(sliding_window=plan.config.sliding_window) if not plan.drop_layers else plan.config
    memory = 0.5 if fixed.score_memory else 0.0
    return replace(plan, config=replace(fixed, top_p=0.5, score_memory=memory, drop_layers="auto"))
