"""What all kernel benchmarks share: the timer, the rates that floors are made of, and how packed requests are long."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from uniprefill_jax.bench.kernel_times.timing import DeviceTimer

Row = dict[str, Any]
Report = Callable[[Row], None]
"""Takes one row as soon as it is measured."""


class Rates(NamedTuple):
    """Bytes per second of a device-to-device copy and bfloat16 operations per second of a large product."""

    copy: float
    product: float


NEAR = 5  # times the timer's resolution
# The best that was ever measured on such devices.
CEILINGS = {"NVIDIA H200": Rates(4.3e12, 790e12)}


@dataclass(frozen=True)
class Conditions:
    """How a run measures.

    Attributes:
        timer: of the default device.
        rates: what floors are reckoned with: CEILINGS, or for other devices what this run measures.
        measured: the rates that this run measures.
        resolution_ms: what the timer cannot tell apart.
        seed: of all random inputs.
        quick: fewer and shorter inputs, fewer repeats.
    """

    timer: DeviceTimer
    rates: Rates
    measured: Rates
    resolution_ms: float
    seed: int
    quick: bool

    @classmethod
    def of_this_device(cls, seed: int, quick: bool) -> "Conditions":
        """Measures the rates. Where there is no accelerator, inputs are short whatever `quick` says."""
        timer = DeviceTimer()
        measured = Rates(_copy_rate(timer), timer.product_rate())
        rates = CEILINGS.get(jax.devices()[0].device_kind, measured)
        return cls(timer, rates, measured, timer.resolution(), seed, quick or not timer.on_accelerator)

    @property
    def repeats(self) -> int:
        """Of every timing, of which the median counts."""
        return 3 if self.quick else 7

    def ceilings_row(self) -> Row:
        """The row that says what the device does at best."""
        rates = {"copy_tb_per_s": self.measured.copy / 1e12, "bfloat16_product_tflops": self.measured.product / 1e12}
        return {"op": "ceilings", "seed": self.seed, **rates, "resolution_ms": self.resolution_ms}

    def timing(self, median_ms: float, *, moved: float = 0.0, operations: float = 0.0) -> Row:
        """The part of a row that says how long it took, and the least that its bytes and operations take.

        `near_resolution` marks times that scatter too much for a plot.
        """
        floor = max(moved / self.rates.copy, operations / self.rates.product) * 1e3
        row = {"median_ms": median_ms, "floor_ms": floor, "share_of_floor": floor / median_ms}
        return row | ({"near_resolution": True} if median_ms < NEAR * self.resolution_ms else {})


def _copy_rate(timer: DeviceTimer) -> float:
    size = 1 << (29 if timer.on_accelerator else 24)
    draw = jax.jit(lambda key: jax.random.normal(key, (size,), jnp.bfloat16))
    sets = [(draw(jax.random.key(number)),) for number in range(2)]
    program = jax.jit(lambda x: x + jnp.bfloat16(1)).lower(*sets[0]).compile()
    return 4 * size / (timer.milliseconds(program, sets, repeats=7) * 1e-3)


def cumulative_lengths(batch: int, length: int) -> np.ndarray:
    """Packed lengths that fill `batch * length` rows; unequal and not multiples of anything where there are several."""
    lengths = np.full(batch, length)
    for r in range(batch // 2):
        shift = (37 * (r + 1)) % (length // 4)
        lengths[2 * r] -= shift
        lengths[2 * r + 1] += shift
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
