"""What a server may be told, validated once."""

from dataclasses import dataclass, field
from pathlib import Path

from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.errors import ConfigError


@dataclass(frozen=True)
class ServerSettings:
    """How one model is served.

    Attributes:
        model_name: what clients call the model.
        host, port: where to listen; port 0 takes a free one.
        api_keys: any of these opens `/v1` and `/profile`; empty: both are open to everybody.
        uniprefill: how prompts are shortened unless a request says otherwise.
        dense_below: prompts shorter than this many tokens drop nothing unless the request asks for it.
        max_body_bytes: longest body of a request.
        max_waiting: most sequences that may wait for the engine; further ones are refused with 429.
        request_timeout: seconds that one request may take, waiting included.
        drain_timeout: seconds that running requests get to finish when the server is told to stop.
        profile_folder: where `/profile/start` writes; None switches both profile endpoints off.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    uniprefill: UniPrefillConfig = UniPrefillConfig()
    dense_below: int = 0
    max_body_bytes: int = 8 * 2**20
    max_waiting: int = 1024
    request_timeout: float = 600.0
    drain_timeout: float = 60.0
    profile_folder: Path | None = None

    def __post_init__(self) -> None:
        if not all(key and key.isascii() and key == key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty or holds spaces or letters beyond ASCII; write one key per line")
        for name, least in (("port", 0), ("dense_below", 0), ("max_body_bytes", 1), ("max_waiting", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"ServerSettings: {name} is {getattr(self, name)}; use at least {least}")
        for name in ("request_timeout", "drain_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"ServerSettings: {name} is {getattr(self, name)}; use seconds above 0")


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one per line; ConfigError for a file without any, OSError for one that cannot be read."""
    keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys:
        raise ConfigError(f"{path} holds no API key; write one per line")
    return keys
