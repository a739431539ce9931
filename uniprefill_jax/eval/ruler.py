"""RULER's tasks: what tells them apart here, their `validation.jsonl` files, and the prompts made of these."""

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from uniprefill_jax.errors import InputError
from uniprefill_jax.eval.cases import Case, parse_names
from uniprefill_jax.tokenizer import Tokenizer

FILE_NAMES = ("validation.jsonl", "validation.jsonl.gz")


@dataclass(frozen=True)
class RulerTask:
    """What the official harness fixes for a task.

    Attributes:
        max_tokens: tokens to generate.
        metric: "all" is the mean over references, "any" their maximum.
        answer_prefix: how the part of a prompt begins that the answer is to continue; it goes after the assistant's
            header, not into the user's turn.
    """

    max_tokens: int
    metric: Literal["all", "any"]
    answer_prefix: str


_NEEDLE = RulerTask(128, "all", " The special magic ")
_QUESTION = RulerTask(32, "any", " Answer:")
TASKS: Mapping[str, RulerTask] = {
    "niah_single_1": _NEEDLE,
    "niah_single_2": _NEEDLE,
    "niah_single_3": _NEEDLE,
    "niah_multikey_1": _NEEDLE,
    "niah_multikey_2": _NEEDLE,
    "niah_multikey_3": _NEEDLE,
    "niah_multivalue": _NEEDLE,
    "niah_multiquery": _NEEDLE,
    "vt": RulerTask(30, "all", " Answer: According to the chain(s)"),
    "cwe": RulerTask(120, "all", " Answer: The top 10 words"),
    "fwe": RulerTask(50, "all", " Answer: According to the coded text"),
    "qa_1": _QUESTION,
    "qa_2": _QUESTION,
}


@dataclass(frozen=True)
class RulerSample:
    """One line of a `validation.jsonl`, its input cut in two.

    Attributes:
        task, length, index: as in `Case`.
        question: the input up to the answer prefix: the user's turn.
        answer_prefix: the rest.
        references: what the answer has to contain.
    """

    task: str
    length: int
    index: int
    question: str
    answer_prefix: str
    references: tuple[str, ...]

    def prompt(self, tokenizer: Tokenizer, chat: bool) -> list[int]:
        """Token ids: with `chat` the question is the user's turn and the prefix begins the answer."""
        if not chat:
            return tokenizer.encode(self.question + self.answer_prefix)
        turn = tokenizer.apply_chat_template([{"role": "user", "content": self.question}])
        return turn + tokenizer.encode(self.answer_prefix, add_special_tokens=False)

    def case(self, tokenizer: Tokenizer, chat: bool) -> Case:
        """The case of this sample for a model's tokenizer."""
        task = TASKS[self.task]
        prompt = tuple(self.prompt(tokenizer, chat))
        return Case(self.task, self.length, self.index, prompt, self.references, task.metric, task.max_tokens)


def parse_tasks(text: str) -> list[str]:
    """The tasks that a user wrote: "all", or names separated by commas, in RULER's order.

    Raises:
        InputError: an unknown name.
    """
    names = parse_names(text, TASKS)
    return [name for name in TASKS if name in names]


def find_files(folder: Path) -> dict[tuple[int, str], Path]:
    """The task files below a folder by (length, task): a task is its folder's name, a length that of a folder above it.

    RULER's own layout (`.../synthetic/4096/data/vt/validation.jsonl`) and `prepare`'s (`4096/vt/...`) both read so.

    Raises:
        InputError: there is none, a file lies under no length, or two claim one place.
    """
    found: dict[tuple[int, str], Path] = {}
    for path in sorted(path for name in FILE_NAMES for path in folder.rglob(name)):
        task = path.parent.name
        if task not in TASKS:
            continue
        lengths = [int(part.name) for part in path.parents if part.name.isdigit()]
        if not lengths:
            raise InputError(f"{path}: no folder above it is named by a length; put it under one such as 4096/{task}")
        other = found.setdefault((lengths[0], task), path)
        if other != path:
            raise InputError(f"{path} and {other} are both {task} at {lengths[0]}; name a folder with one of them")
    if not found:
        raise InputError(f"{folder} holds no {' or '.join(FILE_NAMES)} of a RULER task; make some with eval prepare")
    return found


def read_samples(path: Path, task: str, length: int, count: int | None = None) -> list[RulerSample]:
    """The first `count` samples of a file (None: all).

    Raises:
        InputError: a line is not a sample, or there are fewer than `count`.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as stream:
            lines = [line for line in stream if line.strip()]
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise InputError(f"{path} cannot be read ({error}); make it again") from None
    if count is not None and len(lines) < count:
        raise InputError(f"{path} has {len(lines)} samples, --samples asks for {count}; make more, or ask for fewer")
    samples = []
    for number, line in enumerate(lines[:count], 1):
        try:
            entry = json.loads(line)
            text, references = entry["input"], tuple(map(str, entry["outputs"]))
            index = int(entry["index"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: no RULER sample ({error!r}); make the file again") from None
        question, prefix = split_answer_prefix(task, text)
        samples.append(RulerSample(task, length, index, question, prefix or entry.get("answer_prefix", ""), references))
    return samples


def split_answer_prefix(task: str, text: str) -> tuple[str, str]:
    """An input's part before and from its answer prefix on; the prefix is empty where the file keeps it apart."""
    # The last occurrence: examples and documents may hold the words as well, but nothing of the prompt follows it.
    start = text.rfind(TASKS[task].answer_prefix)
    is_last = start >= 0 and not re.search(r"\n\s*\S", text[start:])
    return (text[:start], text[start:]) if is_last else (text, "")


def load_samples(
    folder: Path, tasks: Sequence[str], lengths: Iterable[int] | None, count: int | None
) -> list[RulerSample]:
    """Samples of the tasks in a folder, at the given lengths (None: at all), by length and task.

    Raises:
        InputError: a length has none of the tasks; see `find_files` and `read_samples` as well.
    """
    files = find_files(folder)
    chosen = sorted({length for length, _ in files}) if lengths is None else list(lengths)
    samples = []
    for length in chosen:
        present = [task for task in tasks if (length, task) in files]
        if not present:
            there = ", ".join(sorted({str(other) for other, _ in files}, key=int))
            raise InputError(f"{folder} has none of {', '.join(tasks)} at length {length}; it has lengths {there}")
        for task in present:
            samples += read_samples(files[length, task], task, length, count)
    return samples
