"""The answers of a run, one JSON line each, so that a run that was cut short goes on where it stopped."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from uniprefill_jax.errors import InputError
from uniprefill_jax.eval.cases import Case
from uniprefill_jax.eval.settings import Setting
from uniprefill_jax.sparsify.methods.registry import setting_of


@dataclass(frozen=True)
class Answer:
    """What one setting made of one case.

    Attributes:
        length, task, index: the case.
        setting: name of the setting.
        prompt: fingerprint of everything that was fed.
        prediction: the answer's text.
        metric, score: see `Case`.
        kept: tokens of every segment, the prompt's first.
        flop_fraction: operations over those of a dense prefill.
        prefill_ms: this prompt's share of its batch's prefill.
    """

    length: int
    task: str
    index: int
    setting: str
    prompt: str
    prediction: str
    metric: str
    score: float
    kept: tuple[int, ...]
    flop_fraction: float
    prefill_ms: float

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What tells it from the other answers of a run."""
        return self.setting, self.length, self.task, self.index


def fingerprint(case: Case) -> str:
    """Changes with anything that decides a case's answer or score."""
    tokens = np.asarray([len(case.prompt), *case.prompt, *case.continuation], np.int32).tobytes()
    rest = json.dumps([case.references, case.metric, case.max_tokens]).encode()
    return hashlib.sha256(tokens + rest).hexdigest()[:16]


def read_answers(path: Path) -> tuple[dict[str, Any], list[Setting], list[Answer]]:
    """What a file of answers holds: what they have in common, the settings, the answers.

    Raises:
        InputError: it is no such file.
    """
    store = AnswerStore(path, None, [])
    settings = [Setting(name, setting_of(definition, str(path))) for name, definition in store.definitions.items()]
    return store.common, settings, list(store.answers.values())


class AnswerStore:
    """Answers in memory and, where there is a path, in a file that another run can go on with.

    The file's first line holds what all answers have in common; a line per setting its definition; all others are
    answers. What was written when a run was killed is used, up to the last whole batch line.
    """

    def __init__(self, path: Path | None, common: dict[str, Any] | None, settings: Iterable[Setting]):
        """Open or begin the file; without `common` it is only read.

        Raises:
            InputError: the file is of another run: something common differs, or a setting of the same name.
        """
        self.path = path
        self.answers: dict[tuple[str, int, str, int], Answer] = {}
        self.common: dict[str, Any] = common or {}
        self.definitions: dict[str, Any] = {}
        lines = [] if path is None or not path.exists() else self._whole_lines(path)
        for number, line in enumerate(lines, 1):
            entry = self._parse(line, number)
            if number == 1:
                self.common = self._compared(entry.get("common"), self.common)
            elif "definition" in entry:
                self.definitions[entry["name"]] = entry["definition"]
            else:
                for fields in entry["answers"]:
                    answer = Answer(**fields | {"kept": tuple(fields["kept"])})
                    self.answers[answer.key] = answer
        if not lines and common is None:
            raise InputError(f"{path} holds no answers; was it made by an eval command?")
        if not lines:
            self._write({"common": common})
        self.define(settings)

    def define(self, settings: Iterable[Setting]) -> None:
        """Take in more settings.

        Raises:
            InputError: the file holds answers of another setting of the same name.
        """
        for setting in settings:
            if setting.name not in self.definitions:
                self._write({"name": setting.name, "definition": setting.config.definition})
                self.definitions[setting.name] = setting.config.definition
            # Compared as settings, not as written: a file may be older than a field, which then has its default.
            elif setting_of(self.definitions[setting.name], str(self.path)).definition != setting.config.definition:
                raise InputError(
                    f"{self.path} holds answers of another setting named {setting.name!r} "
                    f"({self.definitions[setting.name]}); name another file to begin anew"
                )

    def get(self, setting: str, case: Case) -> Answer | None:
        """The answer that is already there.

        Raises:
            InputError: it answers another prompt.
        """
        answer = self.answers.get((setting, *case.key))
        if answer is not None and answer.prompt != fingerprint(case):
            raise InputError(
                f"{self.path} answers another prompt as sample {case.index} of {case.task} at {case.length}; "
                "name another file to begin anew"
            )
        return answer

    def add(self, answers: list[Answer]) -> None:
        """Keep the answers of one batch: all or, should the run be killed meanwhile, none."""
        self._write({"answers": [asdict(answer) for answer in answers]})
        self.answers |= {answer.key: answer for answer in answers}

    def _write(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")

    @staticmethod
    def _whole_lines(path: Path) -> list[str]:
        """The file's lines; a last one without its end is cut off, also in the file."""
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            path.write_bytes(whole)
        return whole.decode("utf-8").splitlines()

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = None
        if not isinstance(entry, dict):
            raise InputError(f"{self.path}, line {number}: not a file of answers; name another file")
        return entry

    def _compared(self, found: Any, wanted: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(found, dict):
            raise InputError(f"{self.path}: not a file of answers; name another file")
        different = next((name for name in wanted if found.get(name) != wanted[name]), None)
        if different is not None:
            raise InputError(
                f"{self.path} was made with {different} {found.get(different)!r}, now it is {wanted[different]!r}; "
                "repeat the command as it was, or name another file to begin anew"
            )
        return found
