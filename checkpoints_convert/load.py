"""Checkpoint tensors become jax arrays: coverage is checked both ways first, then one parameter at a time is read."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from checkpoints_convert.orbax_store import OrbaxSource
from checkpoints_convert.source import CheckpointSource, Index, name_some, normalise_index
from uniprefill_jax.errors import CheckpointError
from uniprefill_jax.models.parameters import ChooseSharding, ParameterSpec

Progress = Callable[[int, int], None]
_READERS = 8  # tensors in flight at a time


def load_parameters(
    source: CheckpointSource,
    specs: dict[str, ParameterSpec],
    *,
    dtype: np.typing.DTypeLike,
    ignore: tuple[str, ...] = (),
    sharding: ChooseSharding | None = None,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Read every parameter of a model.

    At most one stacked parameter, or with a sharding one shard of it, and a few single tensors are held in host memory.

    Args:
        source: an opened checkpoint of any kind.
        specs: the model's declarations by parameter path.
        dtype: of the arrays returned; the checkpoint's values are rounded to it.
        ignore: regular expressions, matched from the start of a tensor's name; those tensors may go unused.
        sharding: gives each parameter's placement; None for the default device.
        progress: called with the bytes made so far and in all.

    Returns: arrays of `spec.full_shape` by parameter path.
    Raises CheckpointError naming the tensors if one is missing, has another shape, or is left over.
    """
    dtype = np.dtype(dtype)
    check_coverage(source, specs, ignore)
    total = sum(int(np.prod(spec.full_shape)) for spec in specs.values()) * dtype.itemsize
    done = 0
    parameters = {}
    for path, spec in specs.items():
        placement = sharding(path, spec) if sharding is not None else None
        if isinstance(source, OrbaxSource):
            parameters[path] = source.restore(path, dtype, placement)
        else:
            parameters[path] = _assemble(source, spec, dtype, placement)
        done += parameters[path].nbytes
        if progress is not None:
            progress(done, total)
    return parameters


def check_coverage(source: CheckpointSource, specs: Mapping[str, ParameterSpec], ignore: tuple[str, ...] = ()) -> None:
    """Every parameter has its tensors with the right shape, and every tensor is used or ignored."""
    needed: dict[str, tuple[int, ...]] = {}
    for path, spec in specs.items():
        if source.kind == "orbax":
            needed[path] = spec.full_shape
            continue
        for name in _tensor_names(spec):
            if name in needed:
                raise CheckpointError(f"{source.path}: two parameters are declared to be tensor {name}; fix the model")
            needed[name] = spec.file_shape
    missing = [name for name in needed if name not in source.tensors]
    if missing:
        raise CheckpointError(
            f"{source.path}: {len(missing)} of {len(needed)} tensors are missing ({name_some(missing)}); "
            "the files are not of the model that its config describes"
        )
    misshapen = [
        f"{name} is {list(source.tensors[name].shape)}, expected {list(shape)}"
        for name, shape in needed.items()
        if source.tensors[name].shape != shape
    ]
    if misshapen:
        raise CheckpointError(f"{source.path}: tensor shapes do not fit the config: {name_some(misshapen, 3)}")
    patterns = [re.compile(pattern) for pattern in ignore]
    surplus = [
        name for name in source.tensors if name not in needed and not any(pattern.match(name) for pattern in patterns)
    ]
    if surplus:
        raise CheckpointError(
            f"{source.path}: {len(surplus)} tensors are not part of the model ({name_some(surplus)}); "
            "the config may name another model or too few layers"
        )


def _tensor_names(spec: ParameterSpec) -> Iterator[str]:
    """Checkpoint tensors of a parameter, in the order in which they are stacked."""
    layers = (None,) if spec.layers is None else spec.layers
    experts = (None,) if spec.experts is None else range(spec.experts)
    for layer, expert in itertools.product(layers, experts):
        yield spec.checkpoint.format(layer=layer, expert=expert)


def _assemble(source: CheckpointSource, spec: ParameterSpec, dtype: np.dtype, placement: Sharding | None) -> jax.Array:
    if placement is None:
        return jax.device_put(_read_part(source, spec, dtype, ()))
    homes: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in placement.addressable_devices_indices_map(spec.full_shape).items():
        part = tuple((axis.start, axis.stop) for axis in normalise_index(index, spec.full_shape))
        homes.setdefault(part, []).append(device)
    shards = []
    for part, devices in homes.items():
        # Read once for all replicas; waiting for the copies leaves one shard at a time in host memory.
        read = _read_part(source, spec, dtype, tuple(slice(*bounds) for bounds in part))
        shards += jax.block_until_ready([jax.device_put(read, device) for device in devices])
    return jax.make_array_from_single_device_arrays(spec.full_shape, placement, shards)


def _read_part(source: CheckpointSource, spec: ParameterSpec, dtype: np.dtype, index: Index) -> np.ndarray:
    """The part of a stacked parameter that `index` selects, reading from each tensor no more than needed."""
    explicit = normalise_index(index, spec.full_shape)
    stacked = len(spec.full_shape) - len(spec.shape)
    file_index, cut = translate_index(spec, explicit[stacked:])

    def read(name: str) -> np.ndarray:
        return source.read(name, file_index).reshape(cut.view)[cut.index].transpose(spec.permutation)

    if not stacked:
        return np.asarray(read(spec.checkpoint), dtype, order="C")
    part = np.empty([axis.stop - axis.start for axis in explicit], dtype)
    names = np.array(list(_tensor_names(spec)), dtype=object).reshape(spec.full_shape[:stacked])

    def place(position: tuple[int, ...]) -> None:
        part[position] = read(str(names[explicit[:stacked]][position]))

    # Reading, dequantising and transposing run outside the interpreter's lock; one thread is far from the disk's rate.
    with ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(place, np.ndindex(part.shape[:stacked])):
            pass
    return part


class _Cut:
    """What to do with a piece read from a file: reshape it to `view`, then take `index`."""

    def __init__(self, view: tuple[int, ...], index: Index):
        self.view, self.index = view, index


def translate_index(spec: ParameterSpec, index: Index) -> tuple[Index, _Cut]:
    """Turn a slice of one layer's parameter into a slice of its tensor, and what is left to cut from that.

    Where the file flattens several axes of the view into one, a slice of the outermost of them is a slice of the file;
    slices of the inner ones are cut after reading. A view that does not refine the file's axes is read whole.
    """
    view_index: list[slice] = [slice(None)] * len(spec.file_view)
    for axis, source_axis in enumerate(spec.permutation):
        view_index[source_axis] = index[axis]
    groups = _axis_groups(spec.file_shape, spec.file_view)
    if groups is None:
        return normalise_index(None, spec.file_shape), _Cut(spec.file_view, tuple(view_index))
    file_index, view, rest = [], list(spec.file_view), list(view_index)
    for size, group in zip(spec.file_shape, groups, strict=True):
        axis = next((axis for axis in group if spec.file_view[axis] > 1), None)
        if axis is None:  # an axis of one: nothing to cut
            file_index.append(slice(0, size))
            continue
        inner = size // spec.file_view[axis]
        chosen = view_index[axis]
        file_index.append(slice(chosen.start * inner, chosen.stop * inner))
        view[axis], rest[axis] = chosen.stop - chosen.start, slice(0, chosen.stop - chosen.start)
    return tuple(file_index), _Cut(tuple(view), tuple(rest))


def _axis_groups(file_shape: tuple[int, ...], view: tuple[int, ...]) -> list[list[int]] | None:
    """For each axis of the file, the axes of the view it is split into; None if the view merges file axes."""
    groups: list[list[int]] = []
    axis = 0
    for size in file_shape:
        group, product = [], 1
        while product < size and axis < len(view):
            product *= view[axis]
            group.append(axis)
            axis += 1
        if product != size:
            return None
        groups.append(group)
    if any(view[rest] != 1 for rest in range(axis, len(view))):
        return None
    return groups
