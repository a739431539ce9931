"""Each method's choice against the plain one, on ragged batches with grouped heads, random and peaked."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import uniprefill_jax as up
from tests.sparsify import plain_methods as plain
from uniprefill_jax.sparsify.drop import DropInputs
from uniprefill_jax.sparsify.methods.compression import compressed_lengths, kept_rows
from uniprefill_jax.sparsify.methods.protocol import Method, SparseAttention, computed_share
from uniprefill_jax.sparsify.methods.request_blocks import blocks_of_requests

LENGTHS = (450, 1, 200, 129)
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
SCALE = HEAD_DIM**-0.5
SIZE = 64
NOWHERE = np.iinfo(np.int32).max


def inputs(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and cumulative lengths; in "peaked" ones a few keys and a distance draw most of the attention."""
    random = np.random.default_rng(seed)
    rows = sum(LENGTHS) + 21  # some padding, which must not count
    queries = random.standard_normal((rows, HEADS, HEAD_DIM))
    keys = random.standard_normal((rows, KV_HEADS, HEAD_DIM))
    cu_seqlens = np.cumsum([0, *LENGTHS]).astype(np.int32)
    if kind == "peaked":
        direction = random.standard_normal((KV_HEADS, HEAD_DIM))
        queries += np.repeat(direction, HEADS // KV_HEADS, axis=0)
        keys[random.choice(rows, 25, replace=False)] += 3.0 * direction
        queries[40:] += 0.8 * np.repeat(keys[:-40], HEADS // KV_HEADS, axis=1)
    keys[cu_seqlens[-1] :] = 1e3
    return queries.astype(np.float32), keys.astype(np.float32), cu_seqlens


def choice(part: SparseAttention, queries: np.ndarray, keys: np.ndarray, cu_seqlens: np.ndarray):
    """The library's choice: per request the blocks [H, n, n] and columns, and the share that is computed."""

    @jax.jit
    def choose(queries, keys, cu_seqlens):
        seen, blocks = part.seen(queries, keys, cu_seqlens, SCALE)
        return seen, blocks.cu_blocks, computed_share(seen, blocks)

    seen, cu_blocks, share = jax.device_get(choose(queries, keys, cu_seqlens))
    spans = list(zip(cu_blocks[:-1], cu_blocks[1:], strict=True))
    assert seen.blocks.sum() == sum(seen.blocks[:, start:stop, start:stop].sum() for start, stop in spans)
    columns = None if seen.columns is None else [seen.columns[:, request] for request in range(len(spans))]
    return [seen.blocks[:, start:stop, start:stop] for start, stop in spans], columns, share


def plain_choice(name: str, options: dict, queries: np.ndarray, keys: np.ndarray, head: int):
    """(blocks, columns) by the plain method, of one request and query head."""
    group = HEADS // KV_HEADS
    own = queries[:, head].astype(np.float64), keys[:, head // group].astype(np.float64)
    if name == "minference":
        return plain.minference(*own, SCALE, size=SIZE, **options)
    if name == "xattention":
        return plain.xattention(*own, SCALE, size=SIZE, **options), []
    if name == "flexprefill":
        budget = {"least": -(-options["min_budget"] // SIZE), "most": -(-options["max_budget"] // SIZE)}
        return plain.flexprefill(*own, SCALE, gamma=options["gamma"], tau=options["tau"], size=SIZE, **budget)[0], []
    proxies = queries.reshape(len(queries), KV_HEADS, group, -1).mean(axis=2), keys
    if options["proxies"] == 1:
        proxies = queries.mean(axis=1, keepdims=True), keys.mean(axis=1, keepdims=True)
    number = head // group if options["proxies"] > 1 else 0
    shared = (part[:, number].astype(np.float64) for part in proxies)
    return plain.proxyattn(*own, *shared, SCALE, gamma=options["gamma"], size=SIZE), []


SETTINGS = [
    ("minference", {"vertical": 33, "slash": 102}),
    ("minference", {"vertical": 120, "slash": 60}),
    ("xattention", {"threshold": 0.6, "stride": 8}),
    ("xattention", {"threshold": 0.9, "stride": 16}),
    ("flexprefill", {"gamma": 0.5, "tau": 0.0, "min_budget": 64, "max_budget": 320}),
    ("flexprefill", {"gamma": 0.7, "tau": 1.0, "min_budget": 100, "max_budget": 999}),
    ("proxyattn", {"gamma": 0.6, "proxies": 1}),
    ("proxyattn", {"gamma": 0.8, "proxies": 3}),
]


# Every method on inputs of both kinds.
@pytest.mark.parametrize(
    ("kind", "name", "options"), [(("random", "peaked")[n % 2], *own) for n, own in enumerate(SETTINGS)]
)
def test_choices_of_blocks(kind: str, name: str, options: dict) -> None:
    queries, keys, cu_seqlens = inputs(kind, seed=len(name))
    fields = "".join(f":{field}={value}" for field, value in options.items())
    part = Method.parse(f"{name}:dense_below=0:block_size={SIZE}{fields}").attention
    assert part is not None
    blocks, columns, share = choice(part, queries, keys, cu_seqlens)
    left_out = 0
    for request, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        computed = 0
        for head in range(HEADS):
            wanted, wanted_columns = plain_choice(name, options, queries[start:stop], keys[start:stop], head)
            np.testing.assert_array_equal(blocks[request][head], wanted, err_msg=f"request {request}, head {head}")
            own = [] if columns is None else [int(row) for row in columns[request][head] if row != NOWHERE]
            assert own == list(wanted_columns)
            entries = np.kron(wanted, np.ones((SIZE, SIZE), bool))[: stop - start, : stop - start]
            entries[:, own] = True
            computed += np.tril(entries).sum()
            left_out += (~wanted & np.tril(np.ones_like(wanted))).sum()
        pairs = (stop - start) * (stop - start + 1) / 2
        np.testing.assert_allclose(share[request], computed / HEADS / pairs, rtol=1e-5)
    assert left_out > 0, "the test has nothing to leave out"


@pytest.mark.parametrize("name", ["minference", "flexprefill", "xattention", "proxyattn"])
def test_short_requests_see_everything(name: str) -> None:
    queries, keys, cu_seqlens = inputs("peaked", seed=1)
    fields = {"minference": ":vertical=30:slash=50", "xattention": ":threshold=0.1"}.get(name, ":gamma=0.1")
    fields += ":min_budget=1" if name == "flexprefill" else ""
    part = Method.parse(f"{name}:dense_below=200:block_size=64{fields}").attention
    assert part is not None
    blocks, _, share = choice(part, queries, keys, cu_seqlens)
    assert share[0] < 1 and share[1:].tolist() == [1, 1, 1]
    assert all((own == np.tril(np.ones_like(own))).all() for own in blocks[1:])


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("minference:vertical=40:slash=200", 200),
        ("minference:vertical=190:slash=60", 190),
        ("flexprefill:gamma=0.1:tau=0:min_budget=180", 180),
        ("flexprefill:gamma=0.1:tau=1:min_budget=180", 180),
        ("flexprefill:gamma=0.1:min_budget=64:dense_below=170", 170),
        ("xattention:threshold=0.1:dense_below=170", 170),
    ],
)
def test_what_a_budget_covers_is_dense(text: str, budget: int) -> None:
    """Up to the budget, where the choice by itself leaves nothing out unless `dense_below` says so, and no further."""
    part = Method.parse(text).attention
    assert part is not None
    by_budget = "dense_below" not in text
    part = replace(part, block_size=SIZE, dense_below=0 if by_budget else part.dense_below)
    assert part.dense_up_to == budget
    random = np.random.default_rng(budget)
    lengths = np.asarray([budget, 1, budget - 63, budget + 400])
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    queries, keys = (random.standard_normal((lengths.sum(), n, HEAD_DIM)).astype(np.float32) for n in (HEADS, KV_HEADS))
    # Near rows attract each other, so that a few diagonals do not cross blocks at every distance.
    place = np.arange(lengths.sum())[:, None, None] / 200
    for rows in (queries, keys):
        rows[:, :, :2] = 6 * np.concatenate([np.cos(place), np.sin(place)], axis=-1)

    @jax.jit
    def shares(queries, keys, cu_seqlens):
        blocks = blocks_of_requests(cu_seqlens, len(queries), SIZE)
        chosen = part.choose(queries, keys, blocks, SCALE)
        chosen = chosen._replace(blocks=(chosen.blocks | jnp.eye(blocks.count, dtype=bool)) & blocks.causal)
        return computed_share(chosen, blocks), computed_share(*part.seen(queries, keys, cu_seqlens, SCALE))

    by_itself, share = jax.device_get(shares(queries, keys, cu_seqlens))
    np.testing.assert_allclose(share[:3], 1, rtol=1e-6)
    assert share[3] < 1
    if by_budget:
        np.testing.assert_allclose(by_itself[:3], 1, rtol=1e-6, err_msg="the fallback changes what is computed")


@pytest.mark.parametrize("kind", ["random", "peaked"])
@pytest.mark.parametrize("text", ["lazyllm", "sliminfer", "sliminfer:queries=150"])
def test_tokens_that_stay(text: str, kind: str) -> None:
    """At the first and the last of three drops, which the tokens of longer prompts have reached."""
    name = text.partition(":")[0]
    queries, keys, cu_seqlens = inputs(kind, seed=6)
    part = Method.parse(f"{text}:dense_below=150:first_keep=0.7:last_keep=0.2").tokens
    assert part is not None
    last = np.maximum(cu_seqlens[1:, None] - part.window + np.arange(part.window), 0)
    prompts = np.asarray([600, 1, 150, 260], np.int32)
    choose = jax.jit(partial(part.choose, num_drops=3, scale=SCALE, num_blocks=8))
    for number, share in ((0, 0.7), (2, 0.2)):
        given = DropInputs(queries[last], keys, cu_seqlens, jnp.zeros(len(keys)))
        drop = jax.device_get(choose(given, prompts, jnp.int32(number)))
        wanted_rows, left = [], 0
        for request, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
            own = queries[max(start, stop - part.window) : stop].astype(np.float64), keys[start:stop].astype(np.float64)
            worth = plain.token_worth(name, *own, SCALE)
            kept = plain.kept_tokens(name, worth, prompts[request], share, part.window)
            if prompts[request] <= 150:
                kept = list(range(stop - start))
            wanted_rows += [start + row for row in kept]
            left += stop - start - len(kept)
            found = drop.block_mass[request]
            np.testing.assert_allclose(found[: -(-(stop - start) // 64)], plain.block_sums(worth, 64), atol=1e-6)
            np.testing.assert_allclose(drop.discarded_mass[request], 1 - worth[kept].sum(), atol=1e-5)
        assert left > 0
        assert drop.indices[: drop.cu_seqlens[-1]].tolist() == wanted_rows
        assert (drop.indices[drop.cu_seqlens[-1] :] >= len(keys)).all()


@pytest.mark.parametrize("kind", ["random", "peaked"])
@pytest.mark.parametrize("text", ["snapkv:capacity=140:window=32", "snapkv:capacity=65:window=64:kernel=1"])
def test_rows_that_snapkv_keeps(text: str, kind: str) -> None:
    queries, keys, cu_seqlens = inputs(kind, seed=4)
    part = Method.parse(text).compression
    assert part is not None
    last = np.maximum(cu_seqlens[1:, None] - part.observed + np.arange(part.observed), 0)
    kept = np.asarray(jax.jit(partial(kept_rows, part, scale=SCALE))(queries[last], keys, cu_seqlens=cu_seqlens))
    ends = np.asarray(compressed_lengths(jnp.asarray(cu_seqlens), part.most_rows))
    options = {field: getattr(part, field) for field in ("capacity", "window", "kernel")}
    for request, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        for head in range(KV_HEADS):
            own = queries[start:stop, 3 * head : 3 * head + 3].swapaxes(0, 1).astype(np.float64)
            wanted = plain.snapkv(own, keys[start:stop, head].astype(np.float64), SCALE, **options)
            found = kept[ends[request] : ends[request + 1], head] - start
            assert found.tolist() == wanted


def test_rows_that_streaming_llm_keeps() -> None:
    _, keys, cu_seqlens = inputs("random", seed=5)
    part = Method.parse("streaming_llm:sinks=3:recent=130").compression
    assert part is not None
    kept = np.asarray(kept_rows(part, jnp.zeros((4, 0, HEADS, HEAD_DIM)), jnp.asarray(keys), cu_seqlens, SCALE))
    wanted = [
        [*range(450)[:3], *range(450)[-130:]],
        [0],
        [*range(200)[:3], *range(200)[-130:]],
        list(range(129)),
    ]
    rows = [start + row for start, own in zip(cu_seqlens[:-1], wanted, strict=True) for row in own]
    assert kept[: len(rows)].T.tolist() == [rows] * KV_HEADS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("minferense", "names 'minferense'; use some of dense, uniprefill, minference"),
        ("xattention:treshold=1", "fields are dense_below, block_size, threshold, stride"),
        ("xattention:threshold=high", "threshold is 'high'; use a number"),
        ("xattention:threshold=1.5", r"threshold is 1.5; use a number in \[0, 1\]"),
        ("xattention:stride=3", "stride is 3; use 4, 8 or 16"),
        ("xattention:block_size=100", "block_size is 100; use 64 or 128"),
        ("minference:vertical=3", "vertical is 3; use an integer of at least 30"),
        ("flexprefill:max_budget=1", "max_budget is 1; use an integer of at least 1024"),
        ("snapkv:capacity=8", "capacity is 8; use an integer of at least 33"),
        ("snapkv:kernel=4", "kernel is 4; use an odd number"),
        ("snapkv+streaming_llm", "do the same"),
        ("lazyllm+uniprefill", "do the same"),
        ("lazyllm:last_keep=0.95", "last_keep is 0.95 and first_keep 0.9"),
        ("sliminfer:queries=2000", "use 1 to 1024"),
        ("uniprefill:drop_layers=a", "layers joined by _"),
    ],
)
def test_texts_that_name_no_method(text: str, message: str) -> None:
    with pytest.raises(up.UniPrefillError, match=message):
        Method.parse(text)


def test_a_method_is_what_its_text_says() -> None:
    method = Method.parse("uniprefill:top_p=0.9:drop_layers=3_7+snapkv:capacity=64")
    assert method.dropping == up.UniPrefillConfig(top_p=0.9, drop_layers=(3, 7))
    assert method.compression is not None and method.compression.most_rows == 64 and method.attention is None
    assert Method.parse("dense").is_dense and Method.of(up.UniPrefillConfig.dense()).name == "dense"
    assert Method.of(up.UniPrefillConfig()).name == "uniprefill"
