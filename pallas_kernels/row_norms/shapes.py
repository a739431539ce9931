"""Widths of the hidden states that the kernel serves in the published models."""

WIDTHS = (2048, 3840, 4096)  # Qwen3-Next-80B, Gemma-3-12B, Llama-3.1-8B
ROWS = 32768
