"""The oracle: transformers, run in its own interpreter (see run.py)."""
