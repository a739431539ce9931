"""Batches of documents, made by processes of their own while the accelerator trains."""

import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np

from training.documents import MOST_QUESTIONS, TASKS, Pieces, make_document
from training.vocabulary import build_tokenizer

_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
_pieces: list[Pieces] = []


class DocumentFactory:
    """Worker processes that make stacks of batches ahead of their use."""

    def __init__(self, workers: int, ahead: int = 3):
        """`ahead` is how many stacks per worker wait at most."""
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
        self._ahead = ahead * workers
        # Processes start when work is submitted and take seconds to be ready: that passes while programs compile.
        for _ in range(workers):
            self._pool.submit(_ready)

    def stacks(self, shape: tuple[int, int, int], seed: int) -> Iterator[_Arrays]:
        """Endless stacks [steps, batch, length] of tokens, question numbers and [steps, batch, questions] of tasks.

        The same shape and seed give the same stacks in the same order, however many workers there are.
        """
        waiting: deque[Future[_Arrays]] = deque()
        number = 0
        try:
            while True:
                while len(waiting) < self._ahead:
                    waiting.append(self._pool.submit(_make_stack, shape, (seed, shape[-1], number)))
                    number += 1
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Stop the workers."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def make_stack(pieces: Pieces, shape: tuple[int, int, int], seed: tuple[int, ...]) -> _Arrays:
    """One stack of batches: tokens and question numbers [steps, batch, length], tasks [steps, batch, questions]."""
    random = np.random.default_rng(seed)
    steps, batch, length = shape
    tokens, question = np.empty((2, steps * batch, length), np.int32)
    tasks = np.full((steps * batch, MOST_QUESTIONS), -1, np.int32)
    for row in range(steps * batch):
        document = make_document(pieces, length, random)
        tokens[row], question[row] = document.tokens, document.question
        tasks[row, : len(document.tasks)] = [TASKS.index(task) for task in document.tasks]
    return tokens.reshape(shape), question.reshape(shape), tasks.reshape(steps, batch, -1)


def _start_worker() -> None:
    _pieces.append(Pieces(build_tokenizer()))


def _ready() -> bool:
    return bool(_pieces)


def _make_stack(shape: tuple[int, int, int], seed: tuple[int, ...]) -> _Arrays:
    return make_stack(_pieces[0], shape, seed)
