"""grouped_matmul: every backend against float64, with NaN in rows and weights of no group; kernels interpreted."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import (
    choose_backend,
    gpu,
    gpu_few_rows,
    grouped_gated_matmul,
    grouped_matmul,
    grouped_matmul_each,
    row_tiles,
)
from pallas_kernels.grouped_matmul.reference import ACTIVATIONS
from pallas_kernels.platform import kernels_of
from tests.kernels.interpreters import KERNELS, interpreted

TOLERANCES = {"float32": 2e-6, "bfloat16": 4e-3}
SMALL_TILES = gpu.Tiling(width=64, stages=2, slots=2, band=2, programs=3)
TABLE = jax.jit(row_tiles.tile_table, static_argnums=2)


class Options(NamedTuple):
    """Sizes of a problem; every matrix but those of groups with rows holds NaN, unless they are to be finite."""

    padding: int
    inner: int
    columns: int
    stacked: int
    dtype: str = "float32"
    finite_weights: bool = False


def problem(random, sizes, options, first_group, products):
    """Rows, matrices, sizes and the exact result per product; NaN in every row that belongs to no group."""
    padding, inner, columns, stacked, dtype, finite_weights = options
    count = sum(sizes)
    rows = random.normal(size=(count + padding, inner)).astype(dtype)
    rows[count:] = np.nan
    weights = [random.normal(size=(stacked, inner, columns)).astype(dtype) for _ in range(products)]
    ends = np.cumsum(sizes)
    exact = [np.zeros((count + padding, columns)) for _ in weights]
    for group, size in enumerate(sizes):
        own = slice(ends[group] - size, ends[group])
        for array, result in zip(weights, exact, strict=True):
            result[own] = rows[own].astype(np.float64) @ array[first_group + group].astype(np.float64)
    used = first_group + np.flatnonzero(sizes)
    for array in () if finite_weights else weights:
        array[np.setdiff1d(np.arange(stacked), used)] = np.nan
    return rows, weights, np.asarray(sizes, np.int32), exact


def silu(x):
    return x / (1 + np.exp(-x))


def check(function, sizes, options, *, first_group, activation=None):
    """`function` agrees with float64, is zero after the last group, and NaN around the groups reaches nothing."""
    products = 1 if activation is None else 2
    rows, weights, group_sizes, exact = problem(
        np.random.default_rng(sum(sizes)), sizes, options, first_group, products
    )
    found = np.asarray(jax.jit(function)(rows, *weights, group_sizes, np.int32(first_group)), np.float64)
    expected = exact[0] if activation is None else activation(exact[0]) * exact[1]
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found[sum(sizes) :], 0)
    largest = np.abs(expected).max(initial=1e-30)
    np.testing.assert_allclose(found, expected, rtol=0, atol=largest * TOLERANCES[options.dtype])


def plain(backend):
    return lambda rows, weights, sizes, first: grouped_matmul(rows, weights, sizes, first_group=first, backend=backend)


def gated(backend):
    return lambda rows, gate, up, sizes, first: grouped_gated_matmul(
        rows, gate, up, sizes, activation="silu", first_group=first, backend=backend
    )


@pytest.mark.parametrize("backend", ["reference", "tiles", "xla"])
@pytest.mark.parametrize(("sizes", "padding", "first_group"), [([7, 0, 20, 1], 5, 2), ([0, 133], 0, 0), ([0], 4, 1)])
def test_xla_agrees_with_float64(backend, sizes, padding, first_group):
    options = Options(padding=padding, inner=24, columns=10, stacked=6, finite_weights=backend == "xla")
    check(plain(backend), sizes, options, first_group=first_group)
    check(gated(backend), sizes, options, first_group=first_group, activation=silu)


@pytest.mark.parametrize(
    ("sizes", "padding"),
    [
        ([5, 0, 130, 64, 1], 10),  # an empty group, one longer than a tile, one that ends on none
        ([0, 0, 200], 0),  # one huge group, rows that are a multiple of 8 and not of a tile
    ],
)
def test_gpu_kernel_interpreted(sizes, padding, capfd):
    options = Options(padding, inner=64, columns=64, stacked=len(sizes) + 3, dtype="bfloat16")
    with interpreted("mosaic_gpu", capfd):
        check(plain("mosaic_gpu"), sizes, options, first_group=2)


def test_gpu_kernel_interpreted_over_many_small_tiles(capfd):
    """Boundaries at every remainder of 8; several steps, column tiles, bands and stores in flight."""

    def product(rows, weights, sizes, first):
        return gpu.grouped_matmul_mosaic_gpu(rows, weights, sizes, first, tiling=SMALL_TILES)

    options = Options(padding=4, inner=192, columns=128, stacked=12, dtype="bfloat16")
    with interpreted("mosaic_gpu", capfd):
        check(product, [1, 2, 3, 5, 60, 0, 67], options, first_group=1)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("programs", "rows"), [(4, 300), (3, 200), (5, 384)])
def test_gpu_kernel_interpreted_with_halves_in_the_last_round(programs, rows, activation, capfd):
    """Tiles of the last round in two, one of them without rows; then the zeros of several tiles."""
    tiling = gpu.Tiling(width=128, stages=2, slots=2, band=2, programs=programs)
    tiles = -(-rows // row_tiles.TILE_ROWS) * 2
    assert 0 < 2 * (tiles % programs) <= programs

    def product(rows, *arguments):
        if activation is None:
            return gpu.grouped_matmul_mosaic_gpu(rows, *arguments, tiling=tiling)
        return gpu.grouped_gated_matmul_mosaic_gpu(rows, *arguments, activation=activation, tiling=tiling)

    options = Options(padding=290, inner=192, columns=256, stacked=3, dtype="bfloat16")
    with interpreted("mosaic_gpu", capfd):
        check(product, [rows], options, first_group=1, activation=activation and silu)


def test_gated_gpu_kernel_interpreted(capfd):
    options = Options(padding=7, inner=64, columns=64, stacked=5, dtype="bfloat16")
    with interpreted("mosaic_gpu", capfd):
        check(gated("mosaic_gpu"), [3, 70, 0, 12], options, first_group=1, activation=silu)


@pytest.mark.parametrize(
    ("rows", "padding", "columns", "tiling"),
    [
        (5, 6, 128, gpu_few_rows.Tiling(width=64, parts=1, stages=2)),
        (16, 0, 192, gpu_few_rows.Tiling(width=64, parts=2, stages=3)),  # of three steps
        (0, 3, 128, None),
    ],
)
def test_few_rows_interpreted(rows, padding, columns, tiling, capfd):
    def product(x, *arguments):
        *weights, sizes, first = arguments
        combine = (lambda product: product) if len(weights) == 1 else (lambda g, u: gpu.ACTIVATIONS["silu"](g) * u)
        return gpu_few_rows.few_rows_matmul(x, tuple(weights), sizes[0], first, combine, tiling)

    options = Options(padding, inner=192, columns=columns, stacked=3, dtype="bfloat16", finite_weights=rows == 0)
    with interpreted("mosaic_gpu", capfd):
        check(product, [rows], options, first_group=1)
        check(product, [rows], options, first_group=2, activation=silu)


@pytest.mark.parametrize("backend", ["tiles", "mosaic_gpu"])
@pytest.mark.parametrize("rows", [5, 130])  # few, and more than the kernel for few takes
@pytest.mark.parametrize("all_columns", [(192, 64, 128), (256, 128, 128)])  # tiles of different width, and of one
def test_products_with_each_of_several_stacks(backend, rows, all_columns, capfd):
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, 128)).astype(jnp.bfloat16)
    x[rows - 2 :] = np.nan
    stacks = tuple(random.normal(size=(3, 128, columns)).astype(jnp.bfloat16) for columns in all_columns)
    for stack in stacks:
        stack[[0, 2]] = np.nan

    def products(x, *stacks):
        return grouped_matmul_each(x, stacks, jnp.full(1, rows - 2, jnp.int32), first_group=1, backend=backend)

    with interpreted("mosaic_gpu", capfd):
        found = jax.jit(products)(x, *stacks)
    for product, stack in zip(found, stacks, strict=True):
        expected = x[: rows - 2].astype(np.float64) @ stack[1].astype(np.float64)
        product = np.asarray(product, np.float64)
        assert np.linalg.norm(product[: rows - 2] - expected) <= 3e-3 * np.linalg.norm(expected)
        assert (product[rows - 2 :] == 0).all()


def test_few_rows_are_cut_into_one_wave():
    for rows, inner, columns in (
        (16, 4096, 4096),
        (128, 14336, 4096),
        (8, 4096, 1024),
        (64, 4096, 28672),
        (8, 576, 192),
    ):
        width, parts, stages = gpu_few_rows.default_tiling(rows, inner, (columns,))
        programs = columns // width * parts
        assert columns % width == 0 and 0 < parts <= inner // gpu_few_rows.STEP and stages >= 3
        assert programs <= gpu_few_rows.PROGRAMS
        assert programs > gpu_few_rows.PROGRAMS / 2 or parts == inner // gpu_few_rows.STEP


@pytest.mark.parametrize("name", gpu.ACTIVATIONS)
def test_activations_of_the_gpu_kernel(name):
    x = jnp.linspace(-30, 30, 4001, dtype=jnp.float32)
    np.testing.assert_allclose(gpu.ACTIVATIONS[name](x), ACTIVATIONS[name](x), rtol=2e-5, atol=1e-6)


def test_tpu_kernel_interpreted(capfd):
    options = Options(padding=9, inner=128, columns=128, stacked=6)
    with interpreted("mosaic_tpu", capfd):
        check(plain("mosaic_tpu"), [70, 0, 90], options, first_group=2)
        check(gated("mosaic_tpu"), [70, 0, 30], options._replace(dtype="bfloat16"), first_group=2, activation=silu)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.one_of(st.just(0), st.integers(0, 300)), min_size=6, max_size=6),
)
def test_tiles_cover_every_row_once(sizes):
    rows = 2048
    table = np.asarray(TABLE(jnp.asarray(sizes, jnp.int32), jnp.int32(7), rows))
    owner = np.full(rows, -2)
    for first, start, end, group in table[: table[-1, 0]]:
        assert first % 8 == 0
        own = slice(max(first, start), min(first + row_tiles.TILE_ROWS, end))
        assert own.start < own.stop
        assert (owner[own] == -2).all()
        owner[own] = group
    expected = np.full(rows, row_tiles.ZEROS)
    expected[: sum(sizes)] = 7 + np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_array_equal(owner, expected)
    assert table[-1, 0] < len(table)


@pytest.mark.gpu
@pytest.mark.skipif(kernels_of() != "mosaic_gpu", reason="needs a GPU of compute capability 9.0")
def test_on_gpu():
    """Boundaries at every remainder of 8 and beyond, NaN around the groups."""
    sizes = [*range(1, 17), 0, 129, 700, 64, 0, 1000, 128]
    options = Options(padding=77, inner=256, columns=512, stacked=26, dtype="bfloat16")
    check(plain("mosaic_gpu"), sizes, options, first_group=2)
    check(gated("mosaic_gpu"), sizes, options, first_group=2, activation=silu)


def test_errors_name_what_is_wrong():
    rows, weights, sizes = jnp.ones((8, 64)), jnp.ones((2, 64, 64)), jnp.array([3, 5])
    with pytest.raises(ValueError, match="rows have 64 columns and weights 32 rows"):
        grouped_matmul(rows, weights[:, :32], sizes)
    with pytest.raises(ValueError, match="3 groups, but weights holds 2"):
        grouped_matmul(rows, weights, jnp.array([1, 2, 3]))
    with pytest.raises(ValueError, match="rows are float32 and up bfloat16"):
        grouped_gated_matmul(rows, weights, weights.astype(jnp.bfloat16), sizes, activation="silu")
    with pytest.raises(ValueError, match="activation is 'relu'"):
        grouped_gated_matmul(rows, weights, weights, sizes, activation="relu")
    with pytest.raises(ValueError, match="backend is 'triton'"):
        grouped_matmul(rows, weights, sizes, backend="triton")  # pyright: ignore[reportArgumentType]
    for backend in KERNELS:
        with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this"):
            grouped_matmul(rows[:, :20], weights[:, :20], sizes, backend=backend)


def test_automatic_choice():
    assert choose_backend(platform="cpu") == "tiles"
    assert choose_backend(platform="tpu") == "mosaic_tpu"
    assert choose_backend(platform="tpu", columns=100) == "xla"
