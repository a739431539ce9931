"""The JSON object that every measuring command writes."""

import json
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("uniprefill-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on; "not installed" where one is missing."""
    return {"python": platform.python_version()} | {package: package_version(package) for package in PACKAGES}


def package_version(package: str) -> str:
    """Version of one installed distribution, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def device_name() -> str:
    """Kind and number of the devices of JAX's default backend, such as "cpu x1"."""
    import jax

    devices = jax.devices()
    return f"{devices[0].device_kind} x{len(devices)}"


def write_result(path: Path, command: str, rows: list[dict[str, Any]], device: str | None = None) -> None:
    """Write one result file: command, date (UTC), device (default: the one in use), versions, rows.

    Raises:
        OSError: the file cannot be written.
    """
    result = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device or device_name(),
        "versions": installed_versions(),
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
