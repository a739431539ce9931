"""Typed errors: each is one line that names the offending value, where it came from and the fix."""


class UniPrefillError(ValueError):
    """Base of every error this library raises on purpose."""


class ConfigError(UniPrefillError):
    """A setting or a model's config.json asks for something impossible or unknown."""


class CheckpointError(UniPrefillError):
    """Checkpoint files are missing, damaged, or do not fit the model."""


class InputError(UniPrefillError):
    """A prompt, token id or array handed to the library cannot be used."""
