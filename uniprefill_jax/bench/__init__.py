"""Measurements of whole models: what `uniprefill bench` runs."""
