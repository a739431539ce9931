"""Compiles whole models for TPUs that are not there: what fits, memory per chip, the kernels used, compile times.

    make tpu-aot        or, in an environment with libtpu (requirements/aot-tpu.txt):
    python -m benchmarks.tpu_aot [--only llama-3.1-8b] [--layers 1] [--json FILE]

Nothing runs: the real compiler places every buffer on the chips of a described topology, one tensor shard per chip, and
refuses a program that does not fit. `prefill` is one prompt of the given length under the published dropping rule;
`decode` is a step after it, with room for 128 generated tokens.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from uniprefill_jax.bench.architectures import ARCHITECTURES
from uniprefill_jax.config import SamplingConfig, UniPrefillConfig
from uniprefill_jax.decode import Continuation, DecodePlan, start_decode, start_run
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import parameter_specs, with_parameters
from uniprefill_jax.parallel.mesh import make_mesh
from uniprefill_jax.parallel.rules import ShardingRules
from uniprefill_jax.prefill import PrefillOutput, prefill
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.programs import Programs
from uniprefill_jax.result_file import package_version, write_result
from uniprefill_jax.sampling import SamplingKind, SamplingNumbers
from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers

DTYPE = jnp.bfloat16
DECODED = 128
GIB = 2**30
TARGETS = {
    "llama-3.1-8b": ("v5e:2x4", "v6e:2x4"),
    "gemma-3-12b": ("v5e:2x4", "v6e:2x4"),
    "qwen3-next-80b-a3b": ("v5p:2x2x2",),
}
LENGTHS = (32768, 131072)
# The kernel behind a scope of the program; nothing but grouped products runs in the scope of the experts.
KERNELS = {
    "block_score": "block_score",
    "top_p_cut": "top_p_select",
    "causal_attention": "causal_attention",
    "gated_delta_rule": "gated_delta_rule",
    "grouped_matmul": "grouped_matmul",
    "experts": "grouped_matmul",
}


@dataclass(frozen=True)
class Case:
    """One model on one topology at one prompt length; `layers` cuts the model short, `dense` drops nothing."""

    arch: str
    topology: str
    length: int
    layers: int | None = None
    dense: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json contents."""
        cut = {} if self.layers is None else {"num_hidden_layers": self.layers}
        return ARCHITECTURES[self.arch] | cut

    @property
    def described(self) -> dict[str, Any]:
        """What every row of this case says of it."""
        layers = self.config["num_hidden_layers"]
        return {
            "arch": self.arch,
            "layers": layers,
            "topology": self.topology,
            "n": self.length,
            "method": "dense" if self.dense or layers == 1 else "uniprefill",
            "libtpu": package_version("libtpu"),
        }

    def made(self, row: dict[str, Any]) -> bool:
        """Whether a row is of this case."""
        return self.described.items() <= row.items()


def main() -> None:
    """Compile all cases; every row is printed and written as soon as it is known, the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TARGETS, help="one of the models")
    parser.add_argument("--topology", help="one topology, such as v5e:2x4")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--layers", type=int, help="cut the models to so many layers")
    parser.add_argument("--dense", action="store_true", help="drop nothing")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file already has")
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    command = " ".join(["python -m benchmarks.tpu_aot", *sys.argv[1:]])
    cases = [
        Case(arch, topology, length, options.layers, options.dense)
        for length in map(int, options.lengths.split(","))
        for arch, names in TARGETS.items()
        for topology in names
        if options.only in (None, arch) and options.topology in (None, topology)
    ]
    rows: list[dict[str, Any]] = []
    if options.resume and options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    for case in cases:
        if any(row["phase"] == "decode" and case.made(row) for row in rows):
            continue
        rows = [row for row in rows if not case.made(row)]
        for row in compile_case(case):
            rows.append(row)
            print(*cells(row), sep="  ", flush=True)
            if options.json is not None:
                write_result(options.json, command, rows)
    Console(width=150).print(table_of(rows))


def compile_case(case: Case) -> Iterator[dict[str, Any]]:
    """Rows of the prefill and of a decode step after it, each as soon as it is compiled."""
    model_config = read_model_config(case.config)
    model = CausalLM(model_config, DTYPE)
    specs = parameter_specs(model)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    rules = ShardingRules.of(specs, make_mesh(len(devices), devices=devices))
    parameters = {
        path: jax.ShapeDtypeStruct(spec.full_shape, DTYPE, sharding=rules.parameter(path, spec))
        for path, spec in specs.items()
    }
    state = with_parameters(model, parameters)  # pyright: ignore[reportArgumentType]
    programs = Programs(model, state, DTYPE, rules)

    setting = UniPrefillConfig.dense() if case.described["method"] == "dense" else UniPrefillConfig()
    drop_layers = resolve_drop_layers(setting, model_config)
    plan = PrefillPlan.for_batch(model_config, setting, drop_layers, [case.length], DTYPE, platform="tpu")
    tokens, cu_seqlens = jax.ShapeDtypeStruct((plan.num_rows,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    inputs = on_all((tokens, cu_seqlens, number, number), rules)
    yield row_of(case, "prefill", partial(programs.compile_prefill, plan, *inputs))

    def prefilled(parameters: nnx.State, *inputs: jax.Array) -> PrefillOutput:
        return prefill(plan, nnx.merge(programs.graph, parameters), *inputs)

    output = jax.eval_shape(prefilled, programs.parameters, *inputs)
    decode_plan = DecodePlan.after(plan, capacity=DECODED)
    drawn, ended = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.bool)
    state = jax.eval_shape(partial(start_decode, decode_plan, num_requests=1), output.caches)
    caches, generated = (jax.tree.map(place, tree, rules.caches(tree)) for tree in (output.caches, state.caches))
    sampling = SamplingConfig()
    others = (
        jax.eval_shape(partial(start_run, plan=decode_plan), replace(state, caches={}), first=drawn, ended=ended),
        output.segments,
        jax.eval_shape(lambda: Continuation(jnp.full((DECODED, 1), -1, jnp.int32), jnp.zeros(1, jnp.int32))),
        SamplingNumbers.of(sampling),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    run, segments, continuation, numbers, stop = on_all(others, rules)
    run = replace(run, state=replace(run.state, caches=generated))
    arguments = (caches, segments, run, numbers, continuation, stop)
    kind = SamplingKind.of(sampling)
    yield row_of(case, "decode", partial(programs.compile_decode, decode_plan, kind, *arguments))


def place(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """What an array with this placement would look like."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def on_all[Tree](tree: Tree, rules: ShardingRules) -> Tree:
    """What a pytree would look like that lies whole on every chip."""
    whole = NamedSharding(rules.mesh, PartitionSpec())
    return jax.tree.map(lambda array: place(array, whole), tree)


def row_of(case: Case, phase: str, compiled: Callable[[], tuple[Any, float]]) -> dict[str, Any]:
    """Compile one program; what does not fit is a row that says so."""
    row = case.described | {"phase": phase, "date": datetime.now(UTC).date().isoformat()}
    start, start_cpu = time.perf_counter(), time.process_time()

    def spent() -> dict[str, float]:
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
        return {"compile_s": round(seconds, 1), "compile_cpu_s": round(cpu_seconds, 1)}

    try:
        program, _ = compiled()
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(r"Used ([\d.]+)G of ([\d.]+)G hbm", str(error))
        if refused is None:
            raise
        needed, there = map(float, refused.groups())
        return row | {"fits": False, "hbm_gib": needed, "usable_gib": there} | spent()
    seconds, memory = spent(), program.memory_analysis()
    sizes = {
        "arguments_gib": memory.argument_size_in_bytes,
        "outputs_gib": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary_gib": memory.temp_size_in_bytes,
        "code_gib": memory.generated_code_size_in_bytes,
    }
    return (
        row
        | {"fits": True, "hbm_gib": round(sum(sizes.values()) / GIB, 2)}
        | {name: round(size / GIB, 3) for name, size in sizes.items()}
        | seconds
        | {"kernels": kernels_in(program.as_text())}
    )


def kernels_in(text: str) -> dict[str, int]:
    """Pallas kernels of a compiled program by name, and how many calls of each it holds."""
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    paths = [re.findall(r'op_name="([^"]*)"', line)[-1] for line in calls]
    words = [re.findall(r"\w+", path)[::-1] for path in paths]
    names = [
        next((KERNELS[word] for word in own if word in KERNELS), path) for own, path in zip(words, paths, strict=True)
    ]
    return dict(sorted(Counter(names).items()))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as the table shows it."""
    memory = (
        f"{row['hbm_gib']:.2f}" if row["fits"] else f"{row['hbm_gib']:.2f} of {row['usable_gib']:.2f}: does not fit"
    )
    kernels = ", ".join(f"{name} {count}" for name, count in row.get("kernels", {}).items())
    model, phase = f"{row['arch']} ({row['layers']} layers)", row["phase"]
    program = f"{phase}, {row['method']}" if phase == "prefill" else phase
    return model, row["topology"], f"{row['n']:,}", program, f"{row['compile_cpu_s']:.0f}", memory, kernels or "none"


def table_of(rows: list[dict[str, Any]]) -> Table:
    """All rows."""
    table = Table(title=f"compiled ahead of time, libtpu {package_version('libtpu')}, bfloat16, one request")
    for name in ("model", "topology", "tokens", "program", "CPU s", "GiB per chip", "kernels (calls in the program)"):
        table.add_column(name, justify="right" if name in ("tokens", "CPU s") else "left")
    for row in rows:
        table.add_row(*cells(row))
    return table


if __name__ == "__main__":
    main()
