"""Time to the first token's logits in transformers, on the same device: the rival of `uniprefill bench ttft`.

A program of its own for an interpreter that has PyTorch and transformers; it imports nothing of this library. Standard
input: one JSON object {"config": config.json contents, "cells": [[length, batch], ...], "runs", "seconds", "dtype"}.
Standard output: one JSON line {"versions": ...}, then one per cell {"n", "batch", "hf_ttft_ms", "runs"} with
{"error"} in place of the time where the device's memory does not suffice. Random weights, fresh random tokens, sdpa,
logits of the last token only, a KV cache as in generation.
"""

import gc
import json
import statistics
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers


def main() -> None:
    """Measure every cell that standard input names."""
    job = json.load(sys.stdin)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {key: value for key, value in job["config"].items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(job["config"]["model_type"], **settings)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
        ).eval()
    _say({"versions": f"torch {torch.__version__}, transformers {transformers.__version__}", "device": device})
    for length, batch in job["cells"]:
        try:
            times = _measure(model, config.vocab_size, device, length, batch, job["runs"], job["seconds"])
            _say({"n": length, "batch": batch, "hf_ttft_ms": statistics.median(times) * 1e3, "runs": len(times)})
        except torch.OutOfMemoryError:
            _say({"n": length, "batch": batch, "error": "out of memory"})
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _measure(model, vocab_size, device, length, batch, runs, seconds):
    """Seconds of every timed run; the first, untimed one warms up."""
    times = []
    started = time.perf_counter()
    for number in range(runs + 1):
        tokens = torch.randint(0, vocab_size, (batch, length), device=device)
        _wait(device)
        start = time.perf_counter()
        with torch.inference_mode():
            model(tokens, logits_to_keep=1, use_cache=True)
        _wait(device)
        if number:
            times.append(time.perf_counter() - start)
        if number and time.perf_counter() - started > seconds:
            break
    return times


def _wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def _say(message):
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
