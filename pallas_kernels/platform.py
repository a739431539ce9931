"""Which kernels the machine at hand can run."""

from typing import Literal

import jax

Kernels = Literal["reference", "mosaic_gpu", "mosaic_tpu"]
Backend = Literal["auto", "reference", "mosaic_gpu", "mosaic_tpu"]


def kernels_of(platform: str | None = None) -> Kernels:
    """ "mosaic_gpu" on Hopper GPUs, "mosaic_tpu" on TPUs, else "reference".

    Args:
        platform: "cpu", "gpu", "cuda", "rocm" or "tpu"; default: that of the mesh in force (`jax.set_mesh`), whose
            devices may be described only and compiled for ahead of time, else what jax runs on. The kernels use
            instructions that only compute capability 9.0 has, so for a GPU the devices are asked, where jax has any.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    platform = platform or (jax.default_backend() if described is None else described.platform)
    if platform == "tpu":
        return "mosaic_tpu"
    if platform in ("gpu", "cuda") and jax.default_backend() == "gpu":
        hopper = all(getattr(device, "compute_capability", None) == "9.0" for device in jax.local_devices())
        return "mosaic_gpu" if hopper else "reference"
    return "reference"
