"""Run as one of two processes with one device each: loads half a model, prefills, prints what was read and kept.

usage: python -m tests.parallel.two_processes ADDRESS NUMBER MODEL FOLDER
"""

import json
import sys
import threading

import jax
import numpy as np

import uniprefill_jax as up
from checkpoints_convert.safetensors_reader import SafetensorsSource
from tests.parallel.comparison import LENGTHS, as_json, prompts_of
from tests.parallel.models import SETTINGS


def main(address: str, number: int, model: str, folder: str) -> None:
    """Join the other process, then load and prefill with it."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.distributed.initialize(address, num_processes=2, process_id=number, initialization_timeout=60)
    assert jax.device_count() == 2 and jax.local_device_count() == 1

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
    results = llm.prefill(prompts_of(LENGTHS), up.UniPrefillConfig(**SETTINGS[model]))
    seen = {"bytes_read": bytes_read, "refused": refused, "results": [as_json(result) for result in results]}
    print(json.dumps(seen), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
