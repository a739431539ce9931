"""Tells the checkpoint formats apart and opens the right one."""

from pathlib import Path

from checkpoints_convert.gguf_file import MAGIC
from checkpoints_convert.gguf_reader import GgufSource
from checkpoints_convert.orbax_store import MANIFEST_NAME, OrbaxSource
from checkpoints_convert.packaged import PACKAGED_MODELS, find_packaged
from checkpoints_convert.safetensors_reader import INDEX_NAME, SafetensorsSource
from checkpoints_convert.source import CheckpointSource, name_some, one_line
from uniprefill_jax.errors import CheckpointError

_EXPECTED = (
    "expected a Hugging Face folder with safetensors, a .safetensors or .gguf file, a converted folder, "
    f"or a packaged model ({', '.join(PACKAGED_MODELS)})"
)


def open_checkpoint(path: Path | str) -> CheckpointSource:
    """Open a checkpoint of any supported kind, or a packaged model by its alias if no such path exists.

    All headers are read and checked here, tensors' contents when they are asked for. Raises CheckpointError.
    """
    location = Path(path).expanduser()
    if not location.exists():
        packaged = find_packaged(str(path))
        if packaged is None:
            raise CheckpointError(f"{path}: no such file or folder; {_EXPECTED}")
        location = packaged
    try:
        return _open_folder(location) if location.is_dir() else _open_file(location)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from None


def _open_file(path: Path) -> CheckpointSource:
    if path.suffix == ".safetensors":
        return SafetensorsSource(path)
    with path.open("rb") as stream:
        magic = stream.read(len(MAGIC))
    if path.suffix == ".gguf" or magic == MAGIC:
        return GgufSource(path)
    raise CheckpointError(f"{path}: not a kind of checkpoint that is known; {_EXPECTED}")


def _open_folder(path: Path) -> CheckpointSource:
    if (path / MANIFEST_NAME).exists():
        return OrbaxSource(path)
    if (path / INDEX_NAME).exists() or any(path.glob("*.safetensors")):
        return SafetensorsSource(path)
    gguf_files = sorted(file.name for file in path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return GgufSource(path / gguf_files[0])
    if gguf_files:
        raise CheckpointError(
            f"{path}: holds {len(gguf_files)} .gguf files ({name_some(gguf_files)}); name one of them"
        )
    if any(path.glob("pytorch_model*.bin")):
        raise CheckpointError(f"{path}: holds only pytorch_model .bin files; save the model as safetensors first")
    raise CheckpointError(f"{path}: holds no checkpoint; {_EXPECTED}")
