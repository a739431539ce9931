"""Run as one process of two that meet an accident; see `test_processes`.

usage: python -m tests.parallel.one_process ADDRESS NUMBER JOIN_SECONDS WHAT

Number 1 dies after the first exchange. WHAT the other does then: "exchange" goes on exchanging, "wait" computes alone.
"""

import os
import sys
import time

import jax
import numpy as np
from jax.sharding import PartitionSpec

import uniprefill_jax as up
from uniprefill_jax.parallel.mesh import replicate
from uniprefill_jax.parallel.processes import joined_processes


def main(address: str, number: int, join_seconds: int, what: str) -> None:
    """Join, exchange once, then let the accident happen."""
    with joined_processes(address, 2, number, join_seconds=join_seconds):
        mesh = up.make_mesh(2)
        ones = replicate(np.ones(2, np.float32), mesh)
        total = jax.shard_map(
            lambda part: jax.lax.psum(part, "tensor"),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        assert np.asarray(jax.jit(total)(ones)).tolist() == [2, 2]
        print("joined", flush=True)
        if number == 1:
            os._exit(7)
        while True:
            if what == "exchange":
                jax.block_until_ready(jax.jit(total)(ones))
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
