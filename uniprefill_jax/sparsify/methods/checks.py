"""Checks of the fields of a method's parts."""

from typing import Any

from uniprefill_jax.errors import ConfigError


def check_integer(part: Any, name: str, least: int) -> None:
    """ConfigError unless a part's field is an integer of at least `least`."""
    value = getattr(part, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{part.name}: {name} is {value!r}; use an integer of at least {least}")


def check_share(part: Any, name: str) -> None:
    """ConfigError unless a part's field is a number in [0, 1]."""
    value = getattr(part, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{part.name}: {name} is {value!r}; use a number in [0, 1]")
