"""Run with eight simulated devices: one model after another on meshes of every size, held against one device.

usage: python -m tests.parallel.simulated quick | MODEL

`quick` is a little of everything; with a model's name that model runs on every mesh and in 300 ragged batches.
Prints one JSON object per line: {"check": name, ...what was seen}. The tests look at these.
"""

import json
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import uniprefill_jax as up
from checkpoints_convert import load_parameters, open_checkpoint, save_orbax
from tests.checkpoints.builders import LLAMA_CONFIG, model_tensors, write_folder
from tests.parallel.comparison import (
    LENGTHS,
    SAMPLING,
    as_json,
    differences,
    logit_error,
    prompts_of,
    ragged_batches,
    served,
)
from tests.parallel.models import SETTINGS, write_checkpoint
from tests.parallel.rounding import RoundingModel
from tests.parity.compare import LOGIT_TOLERANCE
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import parameter_specs
from uniprefill_jax.parallel.rules import ShardingRules
from uniprefill_jax.sampling import SamplingKind, SamplingNumbers

Load = Callable[[str, tuple[int, int] | None], up.LLM]


@dataclass(frozen=True)
class Work:
    """How much to try.

    Attributes:
        meshes: (tensor, data) sizes for every model.
        generating: those on which tokens are generated too.
        serving: tensor sizes on which an engine runs, for every model.
        ragged: how many ragged batches, for model and tensor size.
    """

    meshes: dict[str, list[tuple[int, int]]]
    generating: list[tuple[int, int]]
    serving: dict[str, list[int]]
    ragged: dict[tuple[str, int], int]


ALL = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2)]
AMOUNTS = {
    "quick": Work(
        meshes={"llama": [(2, 2)], "gemma": [(4, 1)], "qwen": [(8, 1)]},
        generating=[(4, 1)],
        serving={"llama": [], "gemma": [8], "qwen": [4]},
        ragged={("gemma", 4): 6, ("qwen", 8): 6},
    ),
} | {
    name: Work(
        meshes={name: ALL},
        generating=[(2, 1), (8, 1), (4, 2)],
        serving={name: [1, 2, 4, 8]},
        ragged={(name, 4): 300},
    )
    for name in SETTINGS
}


def report(check: str, **seen: object) -> None:
    print(json.dumps({"check": check, **seen}), flush=True)


def compare_meshes(work: Work, load: Load, folders: dict[str, Path]) -> None:
    """Kept sets, logits and greedy tokens of every model on every mesh; engines and ragged batches on some of them."""
    for name, meshes in work.meshes.items():
        config = up.UniPrefillConfig(**SETTINGS[name])
        single = load(name, None)
        prompts = prompts_of(LENGTHS)
        expected = single.prefill(prompts, config)
        wanted = work.serving[name] or set(meshes) & set(work.generating)
        tokens = generated(single, prompts, config) if wanted else None
        report("single", model=name, results=[as_json(result) for result in expected], tokens=tokens)
        dropped = [len(prompts[0]) - len(kept) for kept in expected[0].kept_positions.values()]
        for tensor, data in meshes:
            llm = load(name, (tensor, data))
            results = llm.prefill(prompts, config)
            generates = (tensor, data) in work.generating
            report(
                "mesh",
                model=name,
                tensor=tensor,
                data=data,
                dropped=dropped,
                differences=differences(results, expected),
                logit_error=logit_error(results, expected),
                tokens_equal=generated(llm, prompts, config) == tokens if generates else None,
            )
            if data == 1 and (name, tensor) in work.ragged:
                compare_ragged(name, single, llm, RoundingModel(folders[name]), work.ragged[name, tensor])
        for tensor in work.serving[name]:
            serve(name, load(name, (tensor, 1)), config, expected, tokens)


def generated(llm: up.LLM, prompts: list[list[int]], config: up.UniPrefillConfig) -> list[list[int]]:
    """Greedy tokens of every prompt."""
    completions = llm.generate(prompts, config, SAMPLING)
    return [completion.token_ids for completion in completions]


def serve(
    name: str,
    llm: up.LLM,
    config: up.UniPrefillConfig,
    expected: list[up.PrefillResult],
    tokens: list[list[int]] | None,
) -> None:
    """The same prompts through an engine: chunks of one between decode steps of others."""
    streams, reports, engine = served(llm, config)
    pages = engine.executor.pools.keys
    report(
        "engine",
        model=name,
        tensor=pages.sharding.mesh.shape["tensor"],
        differences=differences(reports, expected),
        logit_error=logit_error(reports, expected),
        tokens_equal=streams == tokens,
        heads_per_shard=pages.addressable_shards[0].data.shape[1],
        pages_in_use=engine.stats().pages_in_use,
    )


def compare_ragged(name: str, single: up.LLM, llm: up.LLM, exact: RoundingModel, count: int) -> None:
    """Random ragged batches on the programs that are there; logits further apart than the tolerance are judged."""
    config, programs = up.UniPrefillConfig(**SETTINGS[name]), len(llm.programs.compiled)
    found, judged, error, dropped = [], [], 0.0, 0
    for batch, prompts in enumerate(ragged_batches(single, config, count)):
        expected, results = single.prefill(prompts, config), llm.prefill(prompts, config)
        unequal = differences(results, expected)
        found += unequal
        for request, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
            apart = logit_error([ours], [theirs])
            if apart <= LOGIT_TOLERANCE or any(difference.request == request for difference in unequal):
                error = max(error, apart)
            else:
                why = exact.explain(prompts[request], config, ours.kept_positions, (ours.logits, theirs.logits))
                seen = {"batch": batch, "request": request, "tokens": len(prompts[request]), "logit_error": apart}
                judged.append({**seen, "holds": why.holds, **why._asdict()})
        dropped += sum(len(prompts[0]) - len(kept) for kept in expected[0].kept_positions.values())
    assert len(llm.programs.compiled) == programs, "a ragged batch was compiled for"
    report("ragged", model=name, batches=count, differences=found, logit_error=error, dropped=dropped, judged=judged)


def move_between_meshes(folder: Path, scratch: Path) -> None:
    """A checkpoint that was cut for one mesh, written, and read for another; and back."""
    source = open_checkpoint(folder)
    specs = parameter_specs(CausalLM(read_model_config(source.config), jnp.dtype(jnp.float32)))
    plain = load_parameters(source, specs, dtype="float32")
    rules = {size: ShardingRules.of(specs, up.make_mesh(size)) for size in (8, 2)}
    equal = True
    arrays = load_parameters(source, specs, dtype="float32", sharding=rules[8].parameter)
    for step, size in enumerate((2, 8)):
        converted = scratch / f"converted{step}"
        save_orbax(converted, arrays, source.config)
        arrays = load_parameters(open_checkpoint(converted), specs, dtype="float32", sharding=rules[size].parameter)
        for path, spec in specs.items():
            equal &= arrays[path].sharding == rules[size].parameter(path, spec)
            equal &= bool(np.array_equal(arrays[path], plain[path]))
    report("moved", equal=equal)


def watch_memory(scratch: Path) -> None:
    """Host memory, besides the shards on their devices, while a model is loaded onto eight devices."""
    config = LLAMA_CONFIG | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 1024}
    source = open_checkpoint(write_folder(scratch / "wide", config, model_tensors(config)))
    specs = parameter_specs(CausalLM(read_model_config(config), jnp.dtype(jnp.float32)))
    rules = ShardingRules.of(specs, up.make_mesh(8))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    arrays = load_parameters(source, specs, dtype="float32", sharding=rules.parameter)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    # Parts that every shard holds whole lie eight times on the simulated devices of one host.
    held = sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards)
    report("memory", peak=peak, held=held)


def share_compile_cache(load: Load, scratch: Path) -> None:
    """Entries of a persistent compile cache after one small program was made for two meshes, then for the first again.

    Every model is loaded anew, so that nothing but the folder carries a program over.
    """
    for name, value in {
        "jax_compilation_cache_dir": str(scratch / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_enable_compilation_cache": True,
    }.items():
        jax.config.update(name, value)
    reset_cache()
    sampling, logits = up.SamplingConfig(), np.eye(4, 128, dtype=np.float32)
    entries, tokens = [], []
    for size in (2, 8, 2):
        programs = load("llama", (size, 1)).programs
        numbers, on_mesh = programs.put((SamplingNumbers.of(sampling), logits))
        tokens.append(programs.sample(SamplingKind.of(sampling), numbers, on_mesh)[0].tolist())
        entries.append(sum(file.name.startswith("jit__sample_first") for file in (scratch / "cache").glob("*-cache")))
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    report("cache", entries=entries, tokens=tokens)


def refuse(folder: Path) -> None:
    """Errors that need devices."""
    try:
        up.Engine(up.LLM.load(folder, "float32", mesh=up.make_mesh(1, 2)))
    except up.ConfigError as error:
        report("engine_refused", message=str(error))
    messages = []
    for tensor, data in ((3, 1), (8, 2), (0, 1)):
        try:
            up.LLM.load(folder, "float32", mesh=up.make_mesh(tensor, data))
        except up.ConfigError as error:
            messages.append(str(error))
    report("refused", messages=messages)


def main(amount: str) -> None:
    """Every check."""
    work = AMOUNTS[amount]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folders = {model: write_checkpoint(scratch / model, model) for model in work.meshes}

        def load(model: str, mesh: tuple[int, int] | None) -> up.LLM:
            return up.LLM.load(folders[model], "float32", mesh=None if mesh is None else up.make_mesh(*mesh))

        if amount == "quick":
            refuse(folders["llama"])
            move_between_meshes(folders["llama"], scratch)
            watch_memory(scratch)
            share_compile_cache(load, scratch)
        compare_meshes(work, load, folders)


if __name__ == "__main__":
    assert jax.device_count() == 8
    jax.config.update("jax_enable_compilation_cache", False)
    main(sys.argv[1])
