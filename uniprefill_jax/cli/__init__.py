"""The command line, `uniprefill`: one file per command; nothing here imports JAX before a command needs it."""

from uniprefill_jax.cli.app import main as main
