"""Measurements of whole models and of single kernels: what `uniprefill bench` runs."""
