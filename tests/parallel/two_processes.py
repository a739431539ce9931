"""Run as one of two processes with one device each: loads half a model, runs it, prints what was read and kept.

usage: python -m tests.parallel.two_processes ADDRESS NUMBER MODEL FOLDER [engine]

With `engine` the prompts go through an engine, which both processes step alike, instead of `LLM.prefill`.
"""

import json
import sys
import threading

import jax
import numpy as np

import uniprefill_jax as up
from checkpoints_convert.safetensors_reader import SafetensorsSource
from tests.parallel.comparison import LENGTHS, as_json, prompts_of, served
from tests.parallel.models import SETTINGS
from uniprefill_jax.parallel.processes import joined_processes


def main(address: str, number: int, model: str, folder: str, serves: bool) -> None:
    """Join the other process, then load and prefill with it."""
    jax.config.update("jax_enable_compilation_cache", False)
    with joined_processes(address, 2, number):
        assert jax.device_count() == 2 and jax.local_device_count() == 1
        load_and_run(model, folder, serves)
    jax.distributed.shutdown()


def load_and_run(model: str, folder: str, serves: bool) -> None:
    """One half of a model, and what came of the prompts."""
    whole_read, lock, bytes_read = SafetensorsSource.read, threading.Lock(), 0

    def counted(self: SafetensorsSource, *arguments) -> np.ndarray:
        nonlocal bytes_read
        part = whole_read(self, *arguments)
        with lock:
            bytes_read += part.nbytes
        return part

    SafetensorsSource.read = counted  # type: ignore[method-assign]
    refused = ""
    try:
        up.LLM.load(folder, "float32", mesh=up.make_mesh(1, 2))
    except up.ConfigError as error:
        refused = str(error)
    llm = up.LLM.load(folder, "float32", mesh=up.make_mesh(2))
    config = up.UniPrefillConfig(**SETTINGS[model])
    tokens = None
    if serves:
        tokens, results, _ = served(llm, config)
    else:
        results = llm.prefill(prompts_of(LENGTHS), config)
    seen = {"bytes_read": bytes_read, "refused": refused, "tokens": tokens}
    seen["results"] = [as_json(result) for result in results]
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], serves="engine" in sys.argv[5:])
