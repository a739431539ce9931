"""Grouped matrix products on Hopper GPUs (Mosaic GPU): persistent programs, wgmma on tiles cut at group boundaries.

A table made by XLA lists the row tiles of the groups that have rows, so an empty group costs nothing and group sizes
never recompile. A tile starts at the multiple of 8 rows at or before its group's first row (TMA reaches the layout that
wgmma reads at such rows only); rows of a neighbour that it takes along are computed and not stored. Each program runs
one producer warpgroup, which streams rows and weights through shared memory without a pause between tiles, and two
consumers of 64 rows each. A consumer whose rows all lie beyond the group's end passes its steps without multiplying.
The results leave through swizzled buffers by TMA in runs of 2^i rows: one store for a whole piece of 64 rows, and where
a group starts or ends inside it, as many as the number of rows has bits.

Tiles with products go around among the programs first, then those that are zero all over. Where at most half of the
programs would have a product in its last round, the tiles of that round are cut into halves of 64 rows, whose columns
the two consumers share: what is added up for an element, and in which order, is the same either way. Matrices that take
the same rows share one launch.

A single group of few rows is another matter: see `gpu_few_rows`.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.gpu_few_rows import MOST_ROWS, few_rows_matmul, few_rows_matmul_each
from pallas_kernels.grouped_matmul.row_tiles import ALIGNMENT, TILE_ROWS, ZEROS, tile_table
from pallas_kernels.hopper import MULTIPROCESSORS

ROWS = 64  # of one consumer
CONSUMERS = TILE_ROWS // ROWS
STEP = 64  # columns of the rows, and rows of the weights, in one step: 128 bytes, the widest swizzle
CHUNK = 64  # output columns of one store
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of the 168 that each of 384 threads is launched with

_SQRT_2_OVER_PI = 0.7978845608028654


def _silu(x):
    return x / (1.0 + jnp.exp(-x))


def _gelu_tanh(x):
    # x * (1 + tanh(y)) / 2 = x * sigmoid(2 y)
    return x / (1.0 + jnp.exp(-2.0 * _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}


class Tiling(NamedTuple):
    """How the product is cut.

    Attributes:
        width: output columns of a tile (of each of two products, where there are two).
        stages: steps of the inner dimension in flight.
        slots: stores in flight of one consumer.
        band: row tiles that are walked for one column tile before the next; what they read should stay in the L2 cache.
        programs: programs at most; each walks its share of the tiles.
    """

    width: int
    stages: int
    slots: int
    band: int
    programs: int = MULTIPROCESSORS


def unsupported(inner: int, columns: int, dtype: jnp.dtype, activation: str | None = None) -> str | None:
    """Why the kernel cannot take such a product, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"dtype is {dtype}; it takes bfloat16 (wgmma has no float32 product)"
    if inner % STEP or columns % STEP or not inner or not columns:
        return f"weights are {inner} x {columns}; both must be multiples of {STEP}"
    if activation is not None and activation not in ACTIVATIONS:
        return f"activation is {activation!r}; it takes {', '.join(map(repr, ACTIVATIONS))}"
    return None


def default_tiling(columns: int, products: int, groups: int) -> Tiling:
    """Tiles of 128 rows x 256 columns (of one product, or 128 of each of two), where so many columns divide.

    Measured on an H200: among many groups, three steps in flight and room for a tile's stores beat four steps (1.12
    against 1.25 ms for 327,680 rows of 2,048 in 512 unequal groups); a plain product does better with four. Pairs of
    programs that share their loads of the weights were no faster.
    """
    width = max(size for size in (64, 128, 256) if columns % size == 0 and size * products <= 256)
    stages, slots = (4, 2) if groups == 1 else (3, 4)
    return Tiling(width, stages, slots, band=16)


def grouped_matmul_mosaic_gpu(
    rows: Float[Array, "M K"],
    weights: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
    *,
    tiling: Tiling | None = None,
) -> Float[Array, "M N"]:
    """Rows of group g times `weights[first_group + g]`; see `grouped_matmul`.

    Raises:
        ValueError: a dtype or sizes that the kernel does not take.
    """
    reason = unsupported(weights.shape[1], weights.shape[2], rows.dtype)
    if reason is not None:
        raise ValueError(f"grouped_matmul: backend 'mosaic_gpu' cannot run this: {reason}; use backend='xla'")
    return _grouped(rows, ((weights,),), group_sizes, first_group, lambda product: product, tiling)[0]


def grouped_gated_matmul_mosaic_gpu(
    rows: Float[Array, "M K"],
    gate: Float[Array, "groups K N"],
    up: Float[Array, "groups K N"],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
    *,
    activation: str,
    tiling: Tiling | None = None,
) -> Float[Array, "M N"]:
    """`activation(rows @ gate) * (rows @ up)` by group, in one pass over the rows; see `grouped_gated_matmul`.

    Raises:
        ValueError: a dtype, sizes or an activation that the kernel does not take.
    """
    reason = unsupported(gate.shape[1], gate.shape[2], rows.dtype, activation)
    if reason is not None:
        raise ValueError(f"grouped_gated_matmul: backend 'mosaic_gpu' cannot run this: {reason}; use backend='xla'")
    function = ACTIVATIONS[activation]
    return _grouped(rows, ((gate, up),), group_sizes, first_group, lambda g, u: function(g) * u, tiling)[0]


def takes_each(rows: Float[Array, "M K"], columns: tuple[int, ...], group_sizes: Int32[Array, " G"]) -> bool:
    """Whether one launch serves several matrices: of one group, and of few rows or with tiles as wide as for each."""
    if group_sizes.shape[0] != 1:
        return False
    widths = {default_tiling(count, 1, 1).width for count in columns}
    return rows.shape[0] <= MOST_ROWS or len(widths) == 1


def grouped_matmul_each_mosaic_gpu(
    rows: Float[Array, "M K"],
    weights: tuple[Float[Array, "groups K _"], ...],
    group_sizes: Int32[Array, " G"],
    first_group: Int32[Array, ""],
    *,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """Rows of one group times `weights[first_group]` of every stack, in one kernel; see `grouped_matmul_each`.

    Raises:
        ValueError: a dtype or sizes that the kernel does not take.
    """
    for weight in weights:
        reason = unsupported(weight.shape[1], weight.shape[2], rows.dtype)
        if reason is not None:
            raise ValueError(f"grouped_matmul_each: backend 'mosaic_gpu' cannot run this: {reason}; use backend='xla'")
    if tiling is None and rows.shape[0] <= MOST_ROWS:
        return few_rows_matmul_each(rows, weights, group_sizes[0], first_group)
    stacks = tuple((weight,) for weight in weights)
    return _grouped(rows, stacks, group_sizes, first_group, lambda product: product, tiling)


def _grouped(
    rows: jax.Array,
    stacks: tuple[tuple[jax.Array, ...], ...],
    group_sizes: jax.Array,
    first_group: jax.Array,
    combine: Callable[..., jax.Array],
    tiling: Tiling | None,
) -> tuple[jax.Array, ...]:
    """`combine` of the products with the stacks of each entry of `stacks`, which has its own columns."""
    count = rows.shape[0]
    if tiling is None and len(stacks) == 1 and group_sizes.shape[0] == 1 and count <= MOST_ROWS:
        return (few_rows_matmul(rows, stacks[0], group_sizes[0], first_group, combine),)
    tiling = tiling or default_tiling(stacks[0][0].shape[2], len(stacks[0]), group_sizes.shape[0])
    padded = max(TILE_ROWS, -(-count // ALIGNMENT) * ALIGNMENT)
    if padded > count:
        rows = jnp.pad(rows, ((0, padded - count), (0, 0)))
    table = tile_table(group_sizes, first_group, padded)
    return tuple(result[:count] for result in _kernel(rows, stacks, table, combine, tiling))


def _kernel(rows, stacks, table, combine, tiling):
    """The kernel: every tile of the table, for every `width` columns of all stacks."""
    padded, inner = rows.shape
    dtype = rows.dtype
    products = len(stacks[0])
    width, stages, slots, band, most_programs = tiling
    slots = min(slots, width // CHUNK)  # every tile begins with the first
    all_columns = [weights[0].shape[2] for weights in stacks]
    column_ends = list(accumulate(columns // width for columns in all_columns))  # of every stack's tiles
    column_tiles = column_ends[-1]
    steps_of_product = inner // STEP
    largest = table.shape[0] - 1
    programs = min(most_programs, largest * column_tiles)
    may_halve = width // 2 % CHUNK == 0

    def in_stack(column_tile, action):
        """`action(number, column)` for the stack that a column tile lies in."""
        for number, (begin, end) in enumerate(zip([0, *column_ends], column_ends, strict=False)):
            own = (column_tile >= begin) & (column_tile < end) if len(stacks) > 1 else True
            pl.when(own)(partial(action, number, (column_tile - begin) * width))

    def body(*refs):
        inputs, outs_gmem, scratch = refs[: -5 - len(stacks)], refs[-5 - len(stacks) : -5], refs[-5:]
        rows_gmem, *weights_gmem, table_gmem = inputs
        rows_smem, weights_smem, out_smem, ready, free = scratch
        program = lax.axis_index("program")
        warpgroup = lax.axis_index("warpgroup")
        row_tiles = table_gmem[largest, 1]
        zero_row_tiles = table_gmem[largest, 0] - row_tiles
        tiles = row_tiles * column_tiles
        rounds = lax.div(tiles, programs)  # in which every program has a tile
        rest = tiles - rounds * programs
        halved = (2 * rest <= programs) & may_halve
        with_products = rounds + jnp.where(program < jnp.where(halved, 2 * rest, rest), 1, 0)
        from_last = programs - 1 - program  # zeros begin where the last round of products left programs out
        mine = with_products + lax.div(zero_row_tiles * column_tiles - from_last + (programs - 1), programs)

        def is_half(index):
            return halved & (index == rounds) & (index < with_products)

        def tile_at(index):
            """First row, bounds of the rows to store, group and column tile of one of this program's tiles."""
            half = is_half(index)
            tile = jnp.where(half, rounds * programs + lax.div(program, 2), program + index * programs)
            in_band = band * column_tiles
            first_of_band = lax.div(tile, in_band) * band
            rows_of_band = jnp.clip(row_tiles - first_of_band, 1, band)
            place = lax.rem(tile, in_band)
            zero_tile = from_last + (index - with_products) * programs
            zeros = index >= with_products
            across = jnp.where(zeros, jnp.maximum(zero_row_tiles, 1), rows_of_band)
            place = jnp.where(zeros, zero_tile, place)
            entry = jnp.where(zeros, row_tiles, first_of_band) + lax.rem(place, across)
            # What follows a program's last tile is read and not used.
            entry = jnp.minimum(entry, largest - 1)
            column_tile = jnp.minimum(lax.div(place, across), column_tiles - 1)
            first, start, end, group = (table_gmem[entry, column] for column in range(4))
            first = first + jnp.where(half, lax.rem(program, 2) * ROWS, 0)
            # The second half of a group's last tile may hold none of its rows.
            group = jnp.where(half & (first >= end), ZEROS, group)
            return first, start, end, group, column_tile

        def steps_of(group):
            return jnp.where(group == ZEROS, 0, steps_of_product)

        @pl.when(warpgroup == CONSUMERS)
        def _produce():
            mgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load_tile(index, carry):
                before, first, start, end, group, column_tile = carry
                following = tile_at(index + 1)  # read now, used when this tile's loads are under way
                first = pl.multiple_of(first, ALIGNMENT)
                steps = steps_of(group)

                def load(step, _):
                    slot = lax.rem(before + step, stages)

                    @pl.when(before + step >= stages)
                    def _():
                        mgpu.barrier_wait(free.at[slot])

                    part = pl.ds(step * STEP, STEP)
                    mgpu.copy_gmem_to_smem(
                        rows_gmem.at[pl.ds(first, TILE_ROWS), part], rows_smem.at[slot], ready.at[slot]
                    )

                    def load_weights(stack, column):
                        for product in range(products):
                            source = weights_gmem[stack * products + product]
                            part_of_group = source.at[group, part, pl.ds(column, width)]
                            mgpu.copy_gmem_to_smem(part_of_group, weights_smem.at[slot, product], ready.at[slot])

                    in_stack(column_tile, load_weights)
                    return ()

                lax.fori_loop(0, steps, load, ())
                return before + steps, *following

            total, *_ = lax.fori_loop(0, mine, load_tile, (jnp.int32(0), *tile_at(0)))

            def drain(step, _):  # the interpreter wants every completion seen, and it costs nothing
                mgpu.barrier_wait(free.at[lax.rem(step, stages)])
                return ()

            lax.fori_loop(jnp.maximum(total - stages, 0), total, drain, ())

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            mgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            own_rows = pl.ds(warpgroup * ROWS, ROWS)
            half_width = width // 2
            own_columns = pl.ds(warpgroup * half_width, half_width)

            def multiply(before, steps, columns, operands):
                """`combine` of the products of all steps; `operands` are those of a slot and product."""

                def accumulate(*accumulators):
                    def step(number, _):
                        slot = lax.rem(before + number, stages)
                        mgpu.barrier_wait(ready.at[slot])
                        for product, accumulator in enumerate(accumulators):
                            mgpu.wgmma(accumulator, *operands(slot, product))
                        mgpu.wgmma_wait(products)  # all but this step's have ended

                        @pl.when(number > 0)
                        def _():
                            mgpu.barrier_arrive(free.at[lax.rem(before + number - 1, stages)])

                        return ()

                    lax.fori_loop(0, steps, step, ())
                    return [accumulator[...] for accumulator in accumulators]

                accumulators = [mgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32)] * products
                results = pl.run_scoped(accumulate, *accumulators)

                @pl.when(steps > 0)
                def _():
                    mgpu.barrier_arrive(free.at[lax.rem(before + steps - 1, stages)])

                return combine(*results).astype(dtype)

            def tile(index, carry):
                before, first, start, end, group, column_tile = carry
                following = tile_at(index + 1)  # read now, since used only after this tile
                half = is_half(index)
                first = first + jnp.where(half, 0, warpgroup * ROWS)
                low = jnp.clip(start - first, 0, ROWS)
                high = jnp.clip(end - first, 0, ROWS)
                steps = steps_of(group)

                @pl.when((high > low) & ~half)
                def _whole():
                    values = multiply(
                        before,
                        steps,
                        width,
                        lambda slot, product: (rows_smem.at[slot, own_rows], weights_smem.at[slot, product]),
                    )
                    in_stack(column_tile, partial(store, values, first, low, high))

                if may_halve:

                    @pl.when((high > low) & half)
                    def _half():
                        values = multiply(
                            before,
                            steps,
                            half_width,
                            lambda slot, product: (
                                rows_smem.at[slot, pl.ds(0, ROWS)],
                                weights_smem.at[slot, product, :, own_columns],
                            ),
                        )

                        def store_half(stack, column):
                            store(values, first, low, high, stack, column + warpgroup * half_width)

                        in_stack(column_tile, store_half)
                        if half_width // CHUNK % slots:  # the next tile begins with the first buffer all the same
                            mgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(high <= low)
                def _pass():
                    def step(number, _):
                        slot = lax.rem(before + number, stages)
                        mgpu.barrier_wait(ready.at[slot])
                        mgpu.barrier_arrive(free.at[slot])
                        return ()

                    lax.fori_loop(0, steps, step, ())

                return before + steps, *following

            def store(values, first, low, high, stack, column):
                for number, at in enumerate(range(0, values.shape[1], CHUNK)):
                    buffer = out_smem.at[warpgroup, number % slots]
                    mgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                    buffer[...] = values[:, at : at + CHUNK]
                    mgpu.commit_smem()
                    row = low
                    for bit in reversed(range(ROWS.bit_length())):
                        run = 1 << bit

                        @pl.when((high - low) & run != 0)
                        def _(row=row, run=run, at=at, buffer=buffer):
                            target = pl.ds(first + row, run), pl.ds(column + at, CHUNK)
                            mgpu.copy_smem_to_gmem(
                                buffer.at[pl.ds(row, run)], outs_gmem[stack].at[target], commit_group=False
                            )

                        row = row + ((high - low) & run)
                    mgpu.commit_smem_to_gmem_group()

            lax.fori_loop(0, mine, tile, (jnp.int32(0), *tile_at(0)))
            mgpu.wait_smem_to_gmem(0)

    swizzle = mgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    tiled = mgpu.TilingTransform((ALIGNMENT, STEP)), swizzle  # pyright: ignore[reportAbstractUsage]
    return mgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((padded, columns), dtype) for columns in all_columns),
        scratch_types=[
            mgpu.SMEM((stages, TILE_ROWS, STEP), dtype, transforms=tiled),
            mgpu.SMEM((stages, products, STEP, width), dtype, transforms=tiled),
            mgpu.SMEM((CONSUMERS, slots, ROWS, CHUNK), dtype, transforms=(swizzle,)),
            mgpu.Barrier(num_arrivals=1 + products, num_barriers=stages),
            mgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=mgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(rows, *chain.from_iterable(stacks), table)
