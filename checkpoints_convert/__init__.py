"""Reading and converting model checkpoints: safetensors, GGUF, Orbax, and weights that come as Python packages."""

from checkpoints_convert.load import check_coverage, load_parameters
from checkpoints_convert.opening import open_checkpoint
from checkpoints_convert.orbax_store import save_orbax
from checkpoints_convert.packaged import PACKAGED_MODELS, find_packaged
from checkpoints_convert.source import CheckpointSource, TensorInfo

__all__ = [
    "PACKAGED_MODELS",
    "CheckpointSource",
    "TensorInfo",
    "check_coverage",
    "find_packaged",
    "load_parameters",
    "open_checkpoint",
    "save_orbax",
]
