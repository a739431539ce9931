"""Run with eight devices: loads a folder sharded and not, from safetensors and from Orbax, and compares the bits."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from checkpoints_convert import load_parameters, open_checkpoint, save_orbax
from uniprefill_jax.models.causal_lm import CausalLM, ignored_tensors
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import ParameterSpec, parameter_specs


def main(folder: Path, converted: Path) -> None:
    """Split heads or the widest dividable axis over four devices, and replicate over two."""
    mesh = jax.make_mesh((2, 4), ("replica", "model"), axis_types=(AxisType.Auto, AxisType.Auto))

    def place(path: str, spec: ParameterSpec) -> NamedSharding:
        del path
        dividable = [axis for axis, size in enumerate(spec.full_shape) if size % 4 == 0]
        split = [None] * len(spec.full_shape)
        if dividable:
            split[dividable[-1]] = "model"
        return NamedSharding(mesh, PartitionSpec(*split))

    source = open_checkpoint(folder)
    config = read_model_config(source.config)
    specs = parameter_specs(CausalLM(config, jnp.dtype(jnp.float32)))
    ignore = ignored_tensors(config)
    plain = load_parameters(source, specs, dtype="float32", ignore=ignore)
    sharded = load_parameters(source, specs, dtype="float32", ignore=ignore, sharding=place)
    save_orbax(converted, sharded, source.config)
    again = load_parameters(open_checkpoint(converted), specs, dtype="float32", sharding=place)
    rounded = load_parameters(open_checkpoint(converted), specs, dtype="bfloat16", sharding=place)
    for path, spec in specs.items():
        for array in (sharded[path], again[path], rounded[path]):
            assert array.sharding == place(path, spec), path
        assert np.array_equal(plain[path], sharded[path]) and np.array_equal(plain[path], again[path]), path
        assert np.array_equal(plain[path].astype(jnp.bfloat16), rounded[path]), path
    print(jax.device_count(), "devices equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
