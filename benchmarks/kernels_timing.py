"""Device time of short operations: many calls inside one program, chained so that none is merged or overlapped."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def device_milliseconds(
    operation: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *, calls: int = 16, repeats: int = 7
) -> float:
    """Median milliseconds of one call of `operation`, gaps between its kernels included, dispatch excluded.

    `inputs` holds several sets of arguments, used in turn, so that the caches do not hold what a real call would have
    to fetch. Each call waits for the one before it through an optimization barrier on its arguments.
    """
    sets = [inputs[i % len(inputs)] for i in range(calls)]

    def chain(argument_sets):
        results = []
        for arguments in argument_sets:
            if results:
                arguments, results[-1] = jax.lax.optimization_barrier((arguments, results[-1]))
            results.append(operation(*arguments))
        return results  # all of them: the compiler drops a call whose result goes nowhere, barrier or not

    program = jax.jit(chain)
    jax.block_until_ready(program(sets))
    start = time.perf_counter()
    jax.block_until_ready(program(sets))
    once = time.perf_counter() - start
    # Several programs in flight hide the dispatch of all but the first.
    in_flight = max(2, min(20, int(0.02 / max(once, 1e-6))))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(in_flight):
            results = program(sets)
        jax.block_until_ready(results)
        samples.append((time.perf_counter() - start) / (in_flight * calls) * 1e3)
    return statistics.median(samples)
