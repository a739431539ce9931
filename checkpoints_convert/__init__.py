"""Reading and converting model checkpoints: safetensors, GGUF, Orbax, and weights that come as Python packages."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints_convert.conversion import convert as convert
    from checkpoints_convert.load import check_coverage as check_coverage
    from checkpoints_convert.load import load_parameters as load_parameters
    from checkpoints_convert.opening import open_checkpoint as open_checkpoint
    from checkpoints_convert.orbax_store import save_orbax as save_orbax
    from checkpoints_convert.packaged import PACKAGED_MODELS as PACKAGED_MODELS
    from checkpoints_convert.packaged import find_packaged as find_packaged
    from checkpoints_convert.source import CheckpointSource as CheckpointSource
    from checkpoints_convert.source import TensorInfo as TensorInfo

# Imported when first used: readers and models need each other's modules, and most callers need few of them.
_HOMES = {
    "PACKAGED_MODELS": "packaged",
    "CheckpointSource": "source",
    "TensorInfo": "source",
    "check_coverage": "load",
    "convert": "conversion",
    "find_packaged": "packaged",
    "load_parameters": "load",
    "open_checkpoint": "opening",
    "save_orbax": "orbax_store",
}
__all__ = [
    "PACKAGED_MODELS",
    "CheckpointSource",
    "TensorInfo",
    "check_coverage",
    "convert",
    "find_packaged",
    "load_parameters",
    "open_checkpoint",
    "save_orbax",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
