"""Device time of short programs, without what the host spends on launching them."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

BLOCKER_SIZE = 8192  # one bfloat16 product of this size is about 1.4 ms of a Hopper GPU
BLOCKER_PRODUCTS = 4  # as short as covers the launches: its own spread is the noise of the result
CPU_PRODUCT_SIZE = 1024
MOST_RUNS = 24  # programs in flight; the runtime makes the host wait beyond 32


class DeviceTimer:
    """Times programs behind a long product, so that every launch is queued before the first one starts.

    The time of several runs is that of product and runs together less that of the product alone. On a CPU, which does
    not queue, runs are timed by themselves.
    """

    def __init__(self) -> None:
        self.on_accelerator = jax.default_backend() != "cpu"
        if self.on_accelerator:
            self.factor = jax.random.normal(jax.random.key(0), (BLOCKER_SIZE, BLOCKER_SIZE), jnp.bfloat16)

            def block(factor):
                product = factor
                for _ in range(BLOCKER_PRODUCTS):
                    product = product @ factor  # grows by sqrt(8192) each time, which bfloat16 holds for these few
                return product

            self.block = jax.jit(block).lower(self.factor).compile()
            jax.block_until_ready(self.block(self.factor))

    def resolution(self) -> float:
        """Milliseconds below which a single run's time is noise: the spread of the product alone over the runs."""
        if not self.on_accelerator:
            return 0.0
        alone = [self._seconds(None, (), 0) for _ in range(9)]
        return (statistics.quantiles(alone, n=4)[2] - statistics.quantiles(alone, n=4)[0]) / MOST_RUNS * 1e3

    def product_rate(self) -> float:
        """Operations per second of a large bfloat16 matrix product; on a CPU of a smaller one in float32."""
        if not self.on_accelerator:
            factor = jax.random.normal(jax.random.key(0), (CPU_PRODUCT_SIZE, CPU_PRODUCT_SIZE), jnp.float32)
            program = jax.jit(jnp.dot).lower(factor, factor).compile()
            return 2 * CPU_PRODUCT_SIZE**3 / (self.milliseconds(program, [(factor, factor)], repeats=7) * 1e-3)
        seconds = statistics.median(self._seconds(None, (), 0) for _ in range(9))
        return 2 * BLOCKER_SIZE**3 * BLOCKER_PRODUCTS / seconds

    def milliseconds(
        self, program: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], *, repeats: int
    ) -> float:
        """Median milliseconds of one run of a compiled program, gaps between its kernels included.

        `argument_sets` are used in turn, so that small inputs do not all lie in the caches from the run before.
        """
        jax.block_until_ready(program(*argument_sets[0]))
        alone = min(self._seconds(None, argument_sets, 0) for _ in range(2))
        once = max(self._seconds(program, argument_sets, 1) - alone, 2e-5)
        runs = max(2, min(MOST_RUNS, round(0.006 / once)))
        samples = []
        for _ in range(repeats if once > 5e-4 else 2 * repeats + 1):  # the shorter the run, the larger the noise
            alone = self._seconds(None, argument_sets, 0)
            together = self._seconds(program, argument_sets, runs)
            samples.append((together - alone) / runs * 1e3)
        return statistics.median(samples)

    def _seconds(
        self, program: Callable[..., Any] | None, argument_sets: Sequence[tuple[Any, ...]], runs: int
    ) -> float:
        start = time.perf_counter()
        pending = [self.block(self.factor)] if self.on_accelerator else []
        result = None
        for index in range(runs):
            assert program is not None
            result = program(*argument_sets[index % len(argument_sets)])
            if not self.on_accelerator:
                jax.block_until_ready(result)
        jax.block_until_ready((pending, result))
        return time.perf_counter() - start
