"""Matrix products and shared-memory layouts that both GPU kernels of the gated delta rule use."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

# Operands of the matrix units: three more bits than bfloat16 at the same speed. Keys and queries have length one and
# the values are scaled by their largest, so that the range suffices.
OPERAND = jnp.float16

# As the matrix units read it: tiles of 8 rows. A TMA copy then starts at a multiple of 8 rows.
OPERAND_TILES = (
    mgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    mgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
# As packed rows are copied, which start anywhere.
BY_ROW = (
    mgpu.TilingTransform((1, 64)),  # pyright: ignore[reportAbstractUsage]
    mgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)

# Layouts are stated where they matter: the inference of layouts that is the default does not end on these kernels.
COMPILER = mgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=mgpu.LoweringSemantics.Lane
)


def spare_operands(interpret: bool, *leading: int) -> list:
    """Scratch memory for `product` to pass left operands through: none, except in the CPU interpreter."""
    return [mgpu.SMEM((*leading, 64, 128), OPERAND, transforms=OPERAND_TILES)] if interpret else []


def product(left, right, *, transpose: bool = False, spare=None) -> jax.Array:
    """left @ right, or left @ right.T, in float32, finished on return.

    Args:
        left: 64 rows, in registers or in shared memory.
        right: in shared memory.
        transpose: take the right operand transposed.
        spare: shared memory for the left operand on its way from the registers, for the CPU interpreter, which takes
            both operands from shared memory only.
    """
    if transpose:
        right = right.transpose((1, 0))
    if spare is not None:
        spare = spare.at[:, : left.shape[1]]
        spare[...] = left
        left = spare

    def multiply(accumulator):
        mgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(multiply, mgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[1]), jnp.float32))
