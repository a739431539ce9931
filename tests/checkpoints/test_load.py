"""Loading: the right slice of the right tensor lands in the right place, and coverage is checked both ways."""

import itertools
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_convert import CheckpointSource, TensorInfo, check_coverage, load_parameters, open_checkpoint
from checkpoints_convert.load import _read_part, translate_index
from checkpoints_convert.source import Index, normalise_index
from tests.checkpoints.builders import LLAMA_CONFIG, model_tensors, write_folder
from uniprefill_jax.errors import CheckpointError
from uniprefill_jax.models.causal_lm import CausalLM, ignored_tensors
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import ParameterSpec, constant, parameter_specs

REPOSITORY = Path(__file__).parents[2]


class MemorySource(CheckpointSource):
    """Tensors held in memory; counts the elements that are read."""

    path, kind, config = Path("memory"), "safetensors", {}

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays, self.elements_read, self.lock = arrays, 0, threading.Lock()
        self.tensors = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        part = self.arrays[name][normalise_index(index, self.arrays[name].shape)]
        with self.lock:
            self.elements_read += part.size
        return part.copy()


def make_spec(file_shape: tuple[int, ...], view: tuple[int, ...], permutation: tuple[int, ...], **options: Any):
    """A declaration for tensor "t", or "t.{layer}.{expert}" where it is stacked."""
    shape = tuple(view[axis] for axis in permutation)
    stacked = "".join(f".{{{name[:-1]}}}" for name in ("layers", "experts") if options.get(name) is not None)
    axes = tuple(f"axis{axis}" for axis in range(len(shape)))
    return ParameterSpec(shape, axes, "t" + stacked, file_shape, view, permutation, constant(0.0), **options)


def factorisations(draw: st.DrawFn, file_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Split every axis of a shape into factors, and put in axes of one here and there."""
    view: list[int] = []
    for size in file_shape:
        while size > 1 and draw(st.booleans()):
            factor = draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
            view.append(factor)
            size //= factor
        view.append(size)
    return tuple(view)


@st.composite
def specs_and_slices(draw: st.DrawFn):
    """A random declaration, stacked or not, and a random slice of the parameter."""
    file_shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3)))
    if draw(st.booleans()):
        view = factorisations(draw, file_shape)
    else:  # a view that does not refine the file's axes
        view = (math.prod(file_shape),)
    permutation = tuple(draw(st.permutations(range(len(view)))))
    spec = make_spec(
        file_shape,
        view,
        permutation,
        layers=draw(st.sampled_from([None, (0,), (1, 4, 5)])),
        experts=draw(st.sampled_from([None, 1, 3])),
    )
    slices = []
    for size in spec.full_shape:
        start = draw(st.integers(0, size - 1))
        slices.append(slice(start, draw(st.integers(start + 1, size))))
    return spec, tuple(slices)


def stack(spec: ParameterSpec, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The whole parameter, made the plain way."""
    layers = spec.layers or (None,)
    experts = (None,) if spec.experts is None else range(spec.experts)
    parts = [
        arrays[spec.checkpoint.format(layer=layer, expert=expert)].reshape(spec.file_view).transpose(spec.permutation)
        for layer, expert in itertools.product(layers, experts)
    ]
    return np.stack(parts).reshape(spec.full_shape)


@settings(max_examples=300, deadline=None)
@given(case=specs_and_slices())
def test_any_slice_equals_the_slice_of_the_whole(case: tuple[ParameterSpec, Index]):
    spec, index = case
    generator = np.random.default_rng(0)
    names = [
        spec.checkpoint.format(layer=layer, expert=expert)
        for layer in spec.layers or (None,)
        for expert in range(spec.experts or 1)
    ]
    arrays = {name: generator.standard_normal(spec.file_shape).astype(np.float32) for name in names}
    source = MemorySource(arrays)
    whole = stack(spec, arrays)
    np.testing.assert_array_equal(_read_part(source, spec, np.dtype(np.float32), index), whole[index])
    assert source.elements_read <= whole.size
    np.testing.assert_array_equal(load_parameters(source, {"p": spec}, dtype=np.float32)["p"], whole)


def test_a_shard_of_heads_reads_only_its_rows():
    heads, size, width = 8, 4, 16
    spec = make_spec((heads * size, width), (heads, size, width), (2, 0, 1), layers=(0, 1))
    arrays = {f"t.{layer}": np.zeros((heads * size, width), np.float32) for layer in (0, 1)}
    source = MemorySource(arrays)
    _read_part(source, spec, np.dtype(np.float32), (slice(0, 2), slice(0, width), slice(2, 4), slice(0, size)))
    assert source.elements_read == 2 * (2 * size) * width
    source.elements_read = 0
    _read_part(source, spec, np.dtype(np.float32), (slice(1, 2), slice(4, 8)))
    assert source.elements_read == heads * size * 4


def test_translated_slices_name_file_rows():
    spec = make_spec((12, 5), (3, 4, 5), (2, 0, 1))
    file_index, cut = translate_index(spec, (slice(1, 3), slice(1, 2), slice(0, 4)))
    assert file_index == (slice(4, 8), slice(1, 3)) and cut.view == (1, 4, 2)


@pytest.fixture
def small(tmp_path: Path) -> tuple[CheckpointSource, dict[str, ParameterSpec], tuple[str, ...]]:
    """A small Llama in two shards, its declarations and its ignore list."""
    folder = write_folder(tmp_path / "m", LLAMA_CONFIG, model_tensors(LLAMA_CONFIG, jnp.bfloat16), shards=2)
    source = open_checkpoint(folder)
    config = read_model_config(source.config)
    return source, parameter_specs(CausalLM(config, jnp.dtype(jnp.float32))), ignored_tensors(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_from_a_folder(small, dtype: str):
    source, specs, ignore = small
    seen: list[tuple[int, int]] = []
    parameters = load_parameters(source, specs, dtype=dtype, ignore=ignore, progress=lambda *step: seen.append(step))
    tensors = model_tensors(LLAMA_CONFIG, jnp.bfloat16)
    assert set(parameters) == set(specs)
    for path, spec in specs.items():
        assert parameters[path].dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(parameters[path], stack(spec, tensors).astype(dtype), err_msg=path)
    total = sum(array.nbytes for array in parameters.values())
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_values_are_rounded_to_the_dtype():
    values = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    source = MemorySource({"t": values})
    loaded = load_parameters(source, {"p": make_spec((64, 3), (64, 3), (0, 1))}, dtype="bfloat16")["p"]
    np.testing.assert_array_equal(loaded, jnp.asarray(values).astype(jnp.bfloat16))


def coverage_error(source: CheckpointSource, specs: dict[str, ParameterSpec], ignore: tuple[str, ...]) -> str:
    """The message with which coverage fails, before anything is read."""
    source.read = None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        load_parameters(source, specs, dtype="float32", ignore=ignore)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_error_while_reading_is_passed_on():
    source = MemorySource({f"t.{layer}": np.zeros(2, np.float32) for layer in range(20)})
    source.arrays["t.13"] = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        load_parameters(source, {"p": make_spec((2,), (2,), (0,), layers=tuple(range(20)))}, dtype="float32")


def test_missing_tensors_are_named(small):
    source, specs, ignore = small
    del source.tensors["model.layers.1.mlp.up_proj.weight"]
    message = coverage_error(source, specs, ignore)
    assert "1 of 21 tensors are missing (model.layers.1.mlp.up_proj.weight)" in message


def test_surplus_tensors_are_named_unless_ignored(small):
    source, specs, ignore = small
    source.tensors["mtp.layers.0.x"] = TensorInfo((1,), np.dtype(np.float32))
    check_coverage(source, specs, (*ignore, r"mtp\."))
    message = coverage_error(source, specs, ignore)
    assert "1 tensors are not part of the model (mtp.layers.0.x)" in message


def test_wrong_shapes_are_named(small):
    source, specs, ignore = small
    source.tensors["model.norm.weight"] = TensorInfo((33,), np.dtype(np.float32))
    assert "model.norm.weight is [33], expected [32]" in coverage_error(source, specs, ignore)


def test_two_parameters_cannot_share_a_tensor():
    spec = make_spec((2,), (2,), (0,))
    with pytest.raises(CheckpointError, match="two parameters"):
        check_coverage(MemorySource({"t": np.zeros(2, np.float32)}), {"a": spec, "b": spec})


def test_loading_onto_eight_devices(tmp_path: Path):
    """In a process of its own, because the number of devices is fixed when jax starts."""
    folder = write_folder(tmp_path / "m", LLAMA_CONFIG, model_tensors(LLAMA_CONFIG))
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.checkpoints.sharded_loading",
        str(folder),
        str(tmp_path / "o"),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["8", "devices", "equal"]
