"""Trains a small Qwen3-Next-family model on synthetic long-context text and writes it as a Hugging Face folder."""
