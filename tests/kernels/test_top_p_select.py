"""top_p_select: the reference against float64, row by row, and the kernels, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.top_p_select import choose_backend, top_p_select
from tests.kernels import oracle
from tests.kernels.interpreters import KERNELS, interpreted


def selection(scores, cu_seqlens, top_p, num_rows, block_size, sink, window, cut, over, backend="reference"):
    run = jax.jit(
        lambda s, cu, p: top_p_select(
            s,
            cu,
            p,
            num_rows=num_rows,
            block_size=block_size,
            sink_tokens=sink,
            window_tokens=window,
            cut=cut,
            over=over,
            backend=backend,
        )
    )
    return run(scores, cu_seqlens, top_p)


def random_scores(random, lengths, block_size, power):
    """Scores with NaN beyond each request's last block."""
    num_blocks = max(1, -(-max(lengths) // block_size)) + 1
    scores = random.random((len(lengths), num_blocks)).astype(np.float32) ** power
    for request, length in enumerate(lengths):
        scores[request, -(-length // block_size) :] = np.nan
    return scores, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def agrees_with_float64(found, expected, num_rows):
    rows, lengths, kept_blocks, normalised, margins = expected
    clear = margins > 1e-6
    np.testing.assert_allclose(found.normalised, normalised, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.cut_margin, margins, rtol=1e-4, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(found.kept_blocks)[clear], kept_blocks[clear])
    if clear.all():
        assert np.asarray(found.indices)[: len(rows)].tolist() == rows
        assert (np.asarray(found.indices)[len(rows) :] == num_rows).all()
        assert np.diff(found.cu_seqlens).tolist() == lengths


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=3),
    block_size=st.sampled_from([32, 64]),
    forced=st.sampled_from([(0, 0), (128, 128), (64, 10), (5, 70)]),
    top_p=st.one_of(st.integers(0, 990).map(lambda thousandths: thousandths / 1000), st.just(1.0)),
    cut=st.sampled_from(["crossing", "below"]),
    over=st.sampled_from(["all", "candidates"]),
    power=st.integers(1, 8),
)
def test_reference_agrees_with_float64(lengths, block_size, forced, top_p, cut, over, power):
    scores, cu = random_scores(np.random.default_rng(power), lengths, block_size, power)
    num_rows = int(cu[-1]) + 9
    found = selection(scores, cu, np.float32(top_p), num_rows, block_size, *forced, cut, over)
    expected = oracle.top_p_select(scores, cu, np.float32(top_p), num_rows, block_size, *forced, cut, over)
    agrees_with_float64(found, expected, num_rows)


@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_ties_go_to_the_higher_index(backend, capfd):
    scores = np.ones((1, 8), np.float32)
    with interpreted(backend, capfd):
        found = selection(scores, np.array([0, 512]), np.float32(0.3), 512, 64, 0, 0, "crossing", "all", backend)
    # Mass before the blocks in order: 0, 1/8, 2/8, 3/8: three are kept, from the end.
    assert np.flatnonzero(found.kept_blocks[0]).tolist() == [5, 6, 7]
    assert found.indices[:192].tolist() == list(range(320, 512))
    np.testing.assert_allclose(found.cut_margin, 0.05, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_the_two_cuts_differ_by_the_crossing_block(backend, capfd):
    scores = np.array([[0.6, 0.3, 0.1]], np.float32)
    cu = np.array([0, 192])
    with interpreted(backend, capfd):
        crossing = selection(scores, cu, np.float32(0.7), 192, 64, 0, 0, "crossing", "all", backend)
        below = selection(scores, cu, np.float32(0.7), 192, 64, 0, 0, "below", "all", backend)
        least = selection(scores, cu, np.float32(0.5), 192, 64, 0, 0, "below", "all", backend)
    assert crossing.kept_blocks.tolist() == [[True, True, False]]
    assert below.kept_blocks.tolist() == [[True, False, False]]
    assert least.kept_blocks.tolist() == [[True, False, False]]  # the top block stays in any case


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("cut", "over"), [("crossing", "all"), ("below", "candidates")])
def test_kernels_interpreted(backend, cut, over, capfd):
    random = np.random.default_rng(5)
    lengths = [900, 0, 200, 333]
    scores, cu = random_scores(random, lengths, 32, 3)
    top_p = np.array([0.8, 0.5, 0.5, 1.0], np.float32)
    with interpreted(backend, capfd):
        found = selection(scores, cu, top_p, 1500, 32, 64, 70, cut, over, backend)
    agrees_with_float64(found, oracle.top_p_select(scores, cu, top_p, 1500, 32, 64, 70, cut, over), 1500)
    assert found.kept_blocks[3, : -(-333 // 32)].all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_interpreted_on_random_batches(backend, capfd):
    random = np.random.default_rng(6)
    for index in range(12):
        lengths = random.integers(0, 5000, 3).tolist()
        scores, cu = random_scores(random, lengths, 32, int(random.integers(1, 9)))
        num_rows, top_p = int(cu[-1]) + 1, np.float32(random.uniform(0.05, 0.999))
        options = (num_rows, 32, 128, 128, ("crossing", "below")[index % 2], ("all", "candidates")[index // 2 % 2])
        with interpreted(backend, capfd):
            found = selection(scores, cu, top_p, *options, backend)
        agrees_with_float64(found, oracle.top_p_select(scores, cu, top_p, *options), num_rows)


def test_errors_name_the_value():
    scores, cu = jnp.ones((1, 4)), jnp.array([0, 256])
    options = dict(num_rows=256, block_size=64, sink_tokens=0, window_tokens=0)
    with pytest.raises(ValueError, match="cut is 'above'"):
        top_p_select(scores, cu, 0.5, **options, cut="above")
    with pytest.raises(ValueError, match="over is 'some'"):
        top_p_select(scores, cu, 0.5, **options, over="some")
    with pytest.raises(ValueError, match="backend is 'triton'"):
        top_p_select(scores, cu, 0.5, **options, backend="triton")
    with pytest.raises(ValueError, match="cu_seqlens"):
        top_p_select(scores, jnp.array([0, 1, 2]), 0.5, **options)
    for backend in KERNELS:
        with pytest.raises(ValueError, match="num_blocks is 40000"):
            top_p_select(jnp.ones((1, 40000)), cu, 0.5, **options, backend=backend)


def test_automatic_choice():
    assert choose_backend(platform="cpu") == "reference"
    assert choose_backend(platform="tpu") == "mosaic_tpu"
