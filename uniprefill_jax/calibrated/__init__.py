"""Settings that `uniprefill calibrate` found for models: where they lie, and how they are read and written.

A model's own setting lies beside it: `uniprefill-setting.json` in its folder, FILE.uniprefill-setting.json beside a
single file. Settings of packaged models come with this package, one file per alias; one found by the user goes before.
"""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from uniprefill_jax.config import UniPrefillConfig, config_of
from uniprefill_jax.errors import ConfigError

FILE_NAME = "uniprefill-setting.json"
USER_FOLDER = Path("~/.cache/uniprefill-jax/calibrated")


@dataclass(frozen=True)
class CalibratedSetting:
    """A setting and where it comes from.

    Attributes:
        config: the setting.
        source: the file that holds it.
        evidence: what was measured: loss, its limit, FLOP fraction, prompts, versions.
    """

    config: UniPrefillConfig
    source: str
    evidence: dict[str, Any]


def setting_path(model: str | Path) -> Path:
    """Where the setting of a folder, a file or a packaged model is written."""
    location = Path(model).expanduser()
    if location.is_dir():
        return location / FILE_NAME
    if location.is_file():
        return location.with_name(f"{location.name}.{FILE_NAME}")
    return USER_FOLDER.expanduser() / f"{model}.json"


def calibrated_setting(model: str | Path) -> CalibratedSetting | None:
    """The setting of a folder, a file or a packaged model; None where it has none.

    Raises:
        ConfigError: its file is damaged.
    """
    path = setting_path(model)
    if path.is_file():
        return _read(path.read_text(encoding="utf-8"), str(path))
    if Path(model).expanduser().exists():
        return None
    packaged = resources.files(__package__).joinpath(f"{model}.json")
    return _read(packaged.read_text(encoding="utf-8"), f"packaged with {model}") if packaged.is_file() else None


def write_setting(path: Path, config: UniPrefillConfig, evidence: dict[str, Any]) -> None:
    """Write a setting so that `LLM.load` takes it as the model's default.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"setting": config.definition, "evidence": evidence}, indent=2) + "\n", encoding="utf-8")


def _read(text: str, source: str) -> CalibratedSetting:
    try:
        content = json.loads(text)
        definition, evidence = content["setting"], content["evidence"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{source} holds no setting ({error!r}); delete it, or run calibrate again") from None
    return CalibratedSetting(config_of(definition, source), source, evidence)
