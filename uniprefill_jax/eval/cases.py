"""One question to a model, and how its answer is scored; every kind of evaluation makes a list of these."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from uniprefill_jax.errors import InputError
from uniprefill_jax.results import Completion

Metric = Literal["all", "any", "loss"]
_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Case:
    """A prompt with what is expected of it.

    Attributes:
        task: name of the task.
        length: nominal length of the task's prompts, in tokens; a prompt's own length differs a little.
        index: number of the sample among those of its task and length.
        prompt: token ids.
        references: what the answer has to contain.
        metric: share of references that it contains ("all"), whether it contains any ("any"), or the mean loss of the
            continuation ("loss").
        max_tokens: most tokens of an answer.
        continuation: token ids that follow the prompt and drop nothing: later turns, or the text whose loss counts.
    """

    task: str
    length: int
    index: int
    prompt: tuple[int, ...]
    references: tuple[str, ...]
    metric: Metric
    max_tokens: int
    continuation: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, str, int]:
        """What tells it from the other cases of a run."""
        return self.length, self.task, self.index

    def score(self, completion: Completion) -> float:
        """0 to 100 points of an answer, or, for "loss", nats per token of the continuation (less is better)."""
        if self.metric == "loss":
            return -float(np.mean(completion.continuation_logprobs, dtype=np.float64))
        return string_score(completion.text, self.references, self.metric)


def parse_names(text: str, known: Collection[str]) -> list[str]:
    """The tasks that a user wrote: "all", or names separated by commas.

    Raises:
        InputError: an unknown name.
    """
    names = list(known) if text == "all" else text.split(",")
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise InputError(f'--tasks names {wrong!r}; use "all" or some of {", ".join(known)}')
    return names


def string_score(answer: str, references: Sequence[str], metric: Literal["all", "any"]) -> float:
    """RULER's metric, in points: the share of references found in the answer, or 100 if any of them is.

    Case does not count; like RULER's own, the search takes control characters of the answer for line ends.
    """
    text = _UNPRINTABLE.sub("\n", answer.strip()).strip().lower()
    found = [reference.lower() in text for reference in references]
    return 100.0 * (any(found) if metric == "any" else sum(found) / len(found))
