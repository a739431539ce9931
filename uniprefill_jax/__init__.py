"""UniPrefill in JAX: prefill without the prompt tokens that the last queries do not need. Public API, nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uniprefill_jax.config import EngineConfig as EngineConfig
    from uniprefill_jax.config import SamplingConfig as SamplingConfig
    from uniprefill_jax.config import UniPrefillConfig as UniPrefillConfig
    from uniprefill_jax.engine.engine import Engine as Engine
    from uniprefill_jax.errors import CheckpointError as CheckpointError
    from uniprefill_jax.errors import ConfigError as ConfigError
    from uniprefill_jax.errors import InputError as InputError
    from uniprefill_jax.errors import UniPrefillError as UniPrefillError
    from uniprefill_jax.llm import LLM as LLM
    from uniprefill_jax.parallel.mesh import make_mesh as make_mesh
    from uniprefill_jax.results import Completion as Completion
    from uniprefill_jax.results import PrefillResult as PrefillResult
    from uniprefill_jax.sparsify.methods.protocol import Method as Method
    from uniprefill_jax.sparsify.selection import score_blocks as score_blocks
    from uniprefill_jax.sparsify.selection import select_tokens as select_tokens

# Imported when first used, so that `import uniprefill_jax` costs no more than this file.
_HOMES = {
    "CheckpointError": "errors",
    "Completion": "results",
    "ConfigError": "errors",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "InputError": "errors",
    "LLM": "llm",
    "Method": "sparsify.methods.protocol",
    "PrefillResult": "results",
    "SamplingConfig": "config",
    "UniPrefillConfig": "config",
    "UniPrefillError": "errors",
    "make_mesh": "parallel.mesh",
    "score_blocks": "sparsify.selection",
    "select_tokens": "sparsify.selection",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(_HOMES)
