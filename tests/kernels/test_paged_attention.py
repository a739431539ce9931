"""paged_attention: the reference and the kernels, interpreted, against float64; whatever nobody sees holds NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import choose_backend, gpu, paged_attention
from pallas_kernels.paged_attention.gpu_work import BEGIN, END, count_items, item_stretch, line_up, stretch_begin
from tests.kernels import oracle
from tests.kernels.interpreters import KERNELS, interpreted, paged_batch

# Rounding outputs to bfloat16 alone is 1.7e-3, weights another 1e-3.
TOLERANCES = {np.float32: 2e-6, jnp.bfloat16: 4e-3}
LINE_UP = jax.jit(line_up, static_argnums=2)
COUNT_ITEMS = jax.jit(count_items, static_argnums=3)
ITEM_STRETCH = jax.jit(item_stretch, static_argnums=3)
REQUEST = st.tuples(st.one_of(st.sampled_from([0, 1]), st.integers(2, 300)), st.sampled_from([None, 1, 40, 128]))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Three multiprocessors: interpreted programs are slow, and requests are still cut."""
    monkeypatch.setattr(gpu, "MULTIPROCESSORS", 3)


def check(backend, random, requests, shape, page, dtype, scale):
    """The error against float64, over all requests; those that see nothing get 0."""
    lengths = [length for length, _ in requests]
    first = [max(length - window, 0) if window else 0 for length, window in requests]
    heads, kv_heads, head_dim = shape
    arrays = paged_batch(
        random, lengths, first, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype
    )
    queries, keys, values, table, *ranges = arrays
    # Tables of other layers before and after.
    tables = np.concatenate([np.full_like(table, 1 << 30), table, np.full_like(table, 1 << 30)])
    attend = jax.jit(lambda *a: paged_attention(*a, scale=scale, backend=backend))
    found = attend(queries, keys, values, tables, *ranges, len(requests))
    assert found.dtype == dtype
    found, expected = np.asarray(found, np.float64), oracle.paged_attention(*arrays, scale)
    assert (found[[length == 0 for length in lengths]] == 0).all()
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(found - expected) <= TOLERANCES[dtype] * max(norm, 1e-9)


@pytest.mark.parametrize("backend", ["reference", *KERNELS])
@pytest.mark.parametrize(
    ("requests", "shape", "page", "scale"),
    [
        ([(200, None), (0, None), (1, None), (270, 100)], (4, 2, 64), 64, 0.125),  # empty, single, windowed
        ([(300, 90)], (6, 2, 128), 128, -0.1),  # a window that starts within a page, pages longer than a step
        ([(130, None), (70, 1)], (8, 1, 256), 16, 0.0625),  # pages shorter than a step, the last row alone
    ],
)
def test_backends_agree_with_float64(backend, requests, shape, page, scale, capfd):
    if backend == "reference":
        check(backend, np.random.default_rng(1), requests, shape, page, np.float32, scale)
        return
    with interpreted(backend, capfd):
        check(backend, np.random.default_rng(1), requests, shape, page, jnp.bfloat16, scale)


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=5),
    shape=st.sampled_from([(4, 2, 64), (3, 3, 64), (4, 1, 128), (12, 1, 128), (2, 1, 256), (16, 2, 256)]),
    page=st.sampled_from([8, 16, 32, 64, 128, 256]),
    scale=st.sampled_from([0.125, -0.1]),
    seed=st.integers(0, 99),
)
def test_kernels_interpreted_on_any_shape(backend, requests, shape, page, scale, seed, capfd):
    with interpreted(backend, capfd):
        check(backend, np.random.default_rng(seed), requests, shape, page, jnp.bfloat16, scale)


@pytest.mark.slow
def test_float32_kernel_interpreted(capfd):
    requests = [(200, None), (0, None), (65, 64)]
    with interpreted("mosaic_tpu", capfd):
        check("mosaic_tpu", np.random.default_rng(2), requests, (4, 2, 128), 32, np.float32, 0.1)


@settings(max_examples=30)
@given(
    requests=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=6, max_size=6),
    stretches=st.sampled_from([1, 7, 33]),
)
def test_every_step_is_in_one_item_and_every_item_has_one_owner(requests, stretches):
    step = 64
    lengths, first = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    table = np.asarray(LINE_UP(lengths, first, step))
    steps = int(table[-1, END])
    counts = COUNT_ITEMS(table[:, BEGIN], table[:, END], table[-1, END], stretches)
    expected = [{row // step for row in range(start, length)} for start, length in zip(first, lengths, strict=True)]
    np.testing.assert_array_equal(table[:, 1] - table[:, 0], [len(own) for own in expected])
    bounds = [int(stretch_begin(jnp.int32(n), jnp.int32(steps), stretches)) for n in range(stretches + 1)]
    assert (bounds[0], bounds[-1]) == (0, steps) and np.ptp(np.diff(bounds)) <= 1
    items = {}
    for stretch in range(stretches):
        for place in range(bounds[stretch], bounds[stretch + 1]):
            request = int((table[:, 1] <= place).sum())
            assert items.setdefault(stretch + request, (stretch, request)) == (stretch, request)
    owned = set()
    for request, count in enumerate(np.asarray(counts)):
        for number in range(count):
            stretch = int(ITEM_STRETCH(number, table[request, BEGIN], table[-1, END], stretches))
            owned.add((stretch + request, (stretch, request)))
    assert owned == set(items.items())


def test_lengths_and_windows_do_not_recompile():
    traces = []

    @jax.jit
    def run(*arrays):
        traces.append(1)
        return paged_attention(*arrays, scale=0.1)

    pages = jnp.ones((8, 1, 16, 64))
    for length, first in ((100, 0), (5, 2), (0, 0)):
        run(jnp.ones((1, 2, 64)), pages, pages, jnp.arange(8)[None], jnp.array([length]), jnp.array([first]))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("backend", "shape", "page", "dtype", "names"),
    [
        ("mosaic_gpu", (4, 2, 64), 64, "float32", "dtype is float32"),
        ("mosaic_gpu", (4, 2, 96), 64, "bfloat16", "head size is 96"),
        ("mosaic_gpu", (4, 2, 64), 48, "bfloat16", "pages have 48 rows"),
        ("mosaic_gpu", (64, 1, 64), 64, "bfloat16", "64 query heads share a key head"),
        ("mosaic_tpu", (4, 2, 64), 64, "float16", "dtype is float16"),
        ("mosaic_tpu", (4, 2, 96), 64, "bfloat16", "head size is 96"),
        ("mosaic_tpu", (4, 2, 64), 4, "bfloat16", "pages have 4 rows"),
        ("mosaic_tpu", (32, 32, 128), 256, "bfloat16", "does not fit on chip"),
        ("triton", (4, 2, 64), 64, "bfloat16", "backend is 'triton'"),
        ("reference", (3, 2, 64), 64, "bfloat16", "multiple of key heads"),
    ],
)
def test_what_a_backend_cannot_take_is_refused_before_lowering(backend, shape, page, dtype, names):
    heads, kv_heads, head_dim = shape
    queries = jax.ShapeDtypeStruct((2, heads, head_dim), dtype)
    pages = jax.ShapeDtypeStruct((4, kv_heads, page, head_dim), dtype)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 3), (2,), (2,))]
    with pytest.raises(ValueError, match=names):
        jax.eval_shape(lambda *a: paged_attention(*a, scale=1.0, backend=backend), queries, pages, pages, *integers)


def test_one_dtype_throughout():
    pages = jnp.ones((4, 2, 16, 64), jnp.bfloat16)
    integers = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="queries are float32"):
        paged_attention(jnp.ones((2, 4, 64)), pages, pages, *integers, scale=1.0)


@pytest.mark.parametrize(
    ("tiling", "names"), [(gpu.Tiling(96, 2, 1), "multiple of 64"), (gpu.Tiling(64, 4, 2), "bytes of shared memory")]
)
def test_a_tiling_that_does_not_fit_is_refused(tiling, names):
    arrays = paged_batch(
        np.random.default_rng(0), [9], [0], heads=4, kv_heads=2, head_dim=128, page=16, dtype=jnp.bfloat16
    )
    with pytest.raises(ValueError, match=names):
        gpu.paged_attention_mosaic_gpu(*arrays, scale=1.0, tiling=tiling)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("columns", [8, 16, 32])
def test_default_tilings_fit_and_keep_two_steps_in_flight(head_dim, columns):
    tiling = gpu.default_tiling(head_dim, columns)
    assert tiling.stages >= 2
    assert tiling.programs * gpu.shared_memory(tiling, head_dim, columns) <= gpu.SHARED_MEMORY


def test_automatic_choice():
    assert choose_backend(platform="cpu") == "reference"
    assert choose_backend(platform="tpu") == "mosaic_tpu"
    assert choose_backend(platform="tpu", head_dim=80) == "reference"
