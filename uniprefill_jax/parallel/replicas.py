"""Data replicas: which takes which requests of a batch, and all of them at work at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


def deal(lengths: Sequence[int], replicas: int) -> list[list[int]]:
    """Numbers of the requests that each replica takes: the longest first, always to the one with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    tokens = [0] * replicas
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        replica = tokens.index(min(tokens))
        shares[replica].append(number)
        tokens[replica] += lengths[number]
    return [sorted(share) for share in shares]


def on_each[Replica, Result](
    replicas: Sequence[Replica], shares: Sequence[list[int]], work: Callable[[Replica, list[int]], list[Result]]
) -> list[Result]:
    """`work(replica, share)` on every replica that has a share, each in a thread; results by request number."""
    busy = [(replica, share) for replica, share in zip(replicas, shares, strict=True) if share]
    if len(busy) == 1:
        done = [work(*busy[0])]
    else:
        with ThreadPoolExecutor(len(busy)) as pool:
            done = list(pool.map(lambda job: work(*job), busy))
    results = {
        number: result
        for (_, share), of_share in zip(busy, done, strict=True)
        for number, result in zip(share, of_share, strict=True)
    }
    return [results[number] for number in range(len(results))]
