"""The choices of the methods that UniPrefill is compared with, in plain float64 numpy: one request, one head, loops.

Written from the methods' descriptions. Each function takes the queries of one head [T, d] and the keys of its KV head
[T, d] and says which blocks (and columns) the head computes.
"""

import math

import numpy as np


def softmax_rows(queries: np.ndarray, keys: np.ndarray, scale: float, first: int) -> np.ndarray:
    """Causal softmax of queries `first`, ... over all keys."""
    result = np.zeros((len(queries) - first, len(keys)))
    for number, row in enumerate(range(first, len(queries))):
        scores = scale * (keys[: row + 1] @ queries[row])
        weights = np.exp(scores - scores.max())
        result[number, : row + 1] = weights / weights.sum()
    return result


def column_and_distance_sums(probabilities: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the last rows' probabilities by key, and by how far the key lies before the query."""
    columns, distances = np.zeros(length), np.zeros(length)
    first = length - len(probabilities)
    for number, row in enumerate(probabilities):
        for key in range(first + number + 1):
            columns[key] += row[key]
            distances[first + number - key] += row[key]
    return columns, distances


def best(values: np.ndarray, count: int) -> list[int]:
    """The places of the largest values, ties to the lower place."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]


def block_sums(values: np.ndarray, size: int) -> np.ndarray:
    return np.array([values[start : start + size].sum() for start in range(0, len(values), size)])


def minference(
    queries: np.ndarray, keys: np.ndarray, scale: float, *, vertical: int, slash: int, size: int
) -> tuple[np.ndarray, list[int]]:
    length = len(queries)
    probabilities = softmax_rows(queries, keys, scale, max(0, length - 64))
    columns, distances = column_and_distance_sums(probabilities, length)
    columns[:30], distances[:100] = np.inf, np.inf
    blocks = np.zeros((math.ceil(length / size),) * 2, bool)
    for distance in best(distances, slash):
        for row in range(distance, len(blocks) * size):  # of the last block too, as if it were whole
            blocks[row // size, (row - distance) // size] = True
    return blocks, sorted(best(columns, vertical))


def xattention(
    queries: np.ndarray, keys: np.ndarray, scale: float, *, threshold: float, stride: int, size: int
) -> np.ndarray:
    length, count = len(queries), math.ceil(len(queries) / size)
    small = math.ceil(length / stride)
    scores = np.full((small, small), -np.inf)
    for row in range(small):
        for column in range(row + 1):
            total = 0.0
            for step in range(stride):  # an antidiagonal: later queries meet earlier keys
                query, key = row * stride + stride - 1 - step, column * stride + step
                if query < length and key < length:
                    total += queries[query] @ keys[key]
            scores[row, column] = total * scale / stride
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    per_block, blocks = size // stride, np.zeros((count, count), bool)
    for row in range(count):
        rows = weights[row * per_block : (row + 1) * per_block]
        mass = [rows[:, column * per_block : (column + 1) * per_block].sum() for column in range(row + 1)]
        forced = sorted({0, row})
        held = sum(mass[column] for column in forced)
        blocks[row, forced] = True
        for column in sorted(set(range(row + 1)) - set(forced), key=lambda column: -mass[column]):
            if held < threshold * sum(mass):
                blocks[row, column] = True
            held += mass[column]
    return blocks


def flexprefill(
    queries: np.ndarray, keys: np.ndarray, scale: float, *, gamma: float, tau: float, least: int, most: int, size: int
) -> tuple[np.ndarray, float]:
    """The blocks, and the divergence that decides the head's kind; budgets in blocks."""
    length, count = len(queries), math.ceil(len(queries) / size)
    probabilities = softmax_rows(queries, keys, scale, max(0, length - size))
    columns, distances = (part / len(probabilities) for part in column_and_distance_sums(probabilities, length))
    mean_keys = np.array([keys[start : start + size].mean(axis=0) for start in range(0, length, size)])
    mean_queries = np.array([queries[start : start + size].mean(axis=0) for start in range(0, length, size)])
    guess = np.exp(scale * (mean_keys @ queries[max(0, length - size) :].mean(axis=0)))
    guess, true = guess / guess.sum(), block_sums(columns, size)
    middle = (guess + true) / 2
    divergence = math.sqrt(0.5 * (guess * np.log(guess / middle)).sum() + 0.5 * (true * np.log(true / middle)).sum())
    blocks = np.zeros((count, count), bool)
    for values, place in ((columns, "column"), (distances, "distance")):
        needed = int((np.cumsum(-np.sort(-values)) <= gamma).sum()) + 1
        budget = least if divergence < tau else min(max(needed // size + 1, least), most)
        worth = block_sums(values, size)
        worth[0] = np.inf
        for chosen in best(worth, min(budget, count)):
            for row in range(count):
                column = chosen if place == "column" else row - chosen
                if 0 <= column <= row:
                    blocks[row, column] = True
    if divergence < tau:
        weights = np.zeros((count, count))
        for row in range(count):
            values = np.exp(scale * (mean_keys[: row + 1] @ mean_queries[row]))
            weights[row, : row + 1] = values / values.sum()
        held = 0.0
        for place in np.argsort(-weights, axis=None, kind="stable"):
            held += weights.flat[place]
            if held > gamma * count:
                break
            blocks.flat[place] = True
    return blocks | np.eye(count, dtype=bool), divergence


def proxyattn(
    queries: np.ndarray,
    keys: np.ndarray,
    proxy_queries: np.ndarray,
    proxy_keys: np.ndarray,
    scale: float,
    *,
    gamma: float,
    size: int,
) -> np.ndarray:
    length, count = len(queries), math.ceil(len(queries) / size)
    own = softmax_rows(queries, keys, scale, max(0, length - size)).sum(axis=0)
    needed, held = 0, 0.0
    mass = -np.sort(-block_sums(own, size))
    while held < gamma * mass.sum():
        held += mass[needed]
        needed += 1
    shared = softmax_rows(proxy_queries, proxy_keys, scale, 0)
    blocks = np.zeros((count, count), bool)
    for row in range(count):
        worth = block_sums(shared[row * size : (row + 1) * size].sum(axis=0), size)[: row + 1]
        worth[[0, row]] = np.inf
        blocks[row, best(worth, math.ceil(needed / count * (row + 1) - 1e-9))] = True
        blocks[row, [0, row]] = True
    return blocks


def token_worth(name: str, queries: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """What LazyLLM ("lazyllm") or SlimInfer ("sliminfer") thinks of each token: queries [n, H, d] of the last n tokens,
    keys [T, KV, d] of all."""
    (_, heads, _), (length, kv_heads, _) = queries.shape, keys.shape
    worth = np.zeros(length)
    for head in range(heads):
        own = keys[:, head // (heads // kv_heads)]
        query = queries[-1, head] if name == "lazyllm" else queries[:, head].mean(axis=0)
        size = 1 if name == "lazyllm" else 64
        means = np.array([own[start : start + size].mean(axis=0) for start in range(0, length, size)])
        weights = np.exp(scale * (means @ query - (means @ query).max()))
        weights /= weights.sum()
        for block, weight in enumerate(weights):
            rows = worth[block * size : (block + 1) * size]
            rows += weight / len(rows) / heads
    return worth


def kept_tokens(name: str, worth: np.ndarray, prompt_length: int, share: float, window: int) -> list[int]:
    """The tokens in hand that stay where `share` of the prompt's do."""
    size = 1 if name == "lazyllm" else 64
    blocks = block_sums(worth, size)
    sure = {row // size for row in range(len(worth) - min(window, len(worth)), len(worth))}
    sure |= {0} if name == "sliminfer" else set()
    count = max(math.ceil(math.ceil(prompt_length / size) * round(1000 * share) / 1000), len(sure))
    blocks[sorted(sure)] = np.inf
    chosen = best(blocks, count)
    return sorted(row for block in chosen for row in range(block * size, min(block * size + size, len(worth))))


def snapkv(
    queries: np.ndarray, keys: np.ndarray, scale: float, *, capacity: int, window: int, kernel: int
) -> list[int]:
    """Rows that stay of one KV head, whose query heads are the first axis of `queries`."""
    length = len(keys)
    if length <= capacity:
        return list(range(length))
    votes = sum(softmax_rows(head, keys, scale, length - window).sum(axis=0) for head in queries)[: length - window]
    padded = np.pad(votes, kernel // 2)
    averaged = np.array([padded[place : place + kernel].sum() / kernel for place in range(len(votes))])
    return sorted(best(averaged, capacity - window)) + list(range(length - window, length))
