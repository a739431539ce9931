"""Tests; they mirror the packages. tests/parity checks against transformers, run live."""
