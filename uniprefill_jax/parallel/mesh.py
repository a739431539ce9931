"""The device mesh: `data` replicas of the model, each cut over `tensor` shards."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from uniprefill_jax.errors import ConfigError

DATA, TENSOR = "data", "tensor"


def make_mesh(tensor_parallel_size: int, data_parallel_size: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data_parallel_size` replicas with `tensor_parallel_size` shards each.

    Args:
        tensor_parallel_size: devices that share one copy of the model.
        data_parallel_size: copies of the model, each of which takes a part of every batch.
        devices: where to build it; default: the first of all devices, of every process.

    Raises ConfigError if there are too few devices.
    """
    for name, size in (("tensor_parallel_size", tensor_parallel_size), ("data_parallel_size", data_parallel_size)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"make_mesh: {name} is {size!r}; use an integer of at least 1")
    available = list(jax.devices() if devices is None else devices)
    needed = tensor_parallel_size * data_parallel_size
    if needed > len(available):
        raise ConfigError(
            f"make_mesh: tensor_parallel_size {tensor_parallel_size} x data_parallel_size {data_parallel_size} needs "
            f"{needed} devices, there are {len(available)}; use smaller sizes"
        )
    return jax.make_mesh(
        (data_parallel_size, tensor_parallel_size),
        (DATA, TENSOR),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=available[:needed],
    )


def check_mesh(mesh: Mesh) -> None:
    """ConfigError unless the mesh has the axes of `make_mesh`, and replicas that this process can reach."""
    if mesh.axis_names != (DATA, TENSOR) or any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ConfigError(f"the mesh has axes {mesh.axis_names}; make it with make_mesh")
    here = jax.process_index()
    if mesh.shape[DATA] > 1 and any(device.process_index != here for device in mesh.devices.flat):
        raise ConfigError(
            f"the mesh has {mesh.shape[DATA]} data replicas on devices of several processes; use "
            "data_parallel_size=1 and run one program per replica, behind a load balancer"
        )


def replicas_of(mesh: Mesh) -> list[Mesh]:
    """One mesh per data replica, each with a `data` axis of 1."""
    return [Mesh(devices[None], mesh.axis_names, axis_types=mesh.axis_types) for devices in mesh.devices]


def replicate(array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """An array of the host on every device of a mesh; every process passes the same values."""
    if mesh is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, PartitionSpec()), lambda index: np.asarray(array[index])
    )


def on_replica(array: jax.Array, mesh: Mesh, replica: Mesh) -> jax.Array:
    """The copy of an array that lies on one of `replicas_of(mesh)`, without moving it."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding) and sharding.mesh == mesh
    own = NamedSharding(replica, sharding.spec)
    devices = set(replica.devices.flat)
    shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays(array.shape, own, shards)
