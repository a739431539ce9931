"""Synthetic documents of an exact number of tokens, with facts hidden in filler and questions about them at the end.

Everything is put together from pieces that were tokenised once, as numpy arrays: a document costs well under a
millisecond, and processes without an accelerator make them while it trains.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from training import templates, words
from training.vocabulary import END_OF_TEXT, bundled_prose

TASKS = ("single", "multikey", "multivalue", "multiquery", "ordinal", "listing", "hops")
MOST_QUESTIONS = 64
ASKING = -2
SHORTEST = 256  # tokens of a document
_POOL = 6000  # keys, names and sentences that documents draw from
Tokens = Int[np.ndarray, " tokens"]


class Question(NamedTuple):
    """What is asked, how the answer begins where it says, and which task it belongs to."""

    prompt: Tokens
    answer: Tokens
    task: str


@dataclass(frozen=True)
class Document:
    """A document of an exact length.

    Attributes:
        tokens: facts in filler, then questions, each with its answer.
        question: for every token the number of the question whose answer it is part of; `ASKING` in the wording of a
            question; -1 elsewhere.
        tasks: task of every question.
    """

    tokens: Tokens
    question: Tokens
    tasks: tuple[str, ...]


class Pieces:
    """Tokenised parts of documents."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0):
        """Tokenise the pools: `seed` draws the keys, names, identifiers and sentences in them."""
        random = np.random.default_rng(seed)

        def encoded(texts: list[str]) -> list[Tokens]:
            return [np.asarray(encoding.ids, np.int32) for encoding in tokenizer.encode_batch(texts)]

        self._tokenizer = tokenizer
        self._texts: dict[str, Tokens] = {}
        self.keys = encoded(sorted({f" {words.key(random)}" for _ in range(_POOL)}))
        self.identifiers = encoded([f" {words.unique_identifier(random)}" for _ in range(_POOL)])
        self.names = encoded(sorted({f" {words.variable_name(random)}" for _ in range(_POOL)}))
        self.sentences = np.concatenate(encoded([f" {words.sentence(random)}" for _ in range(_POOL)]))
        self.prose = np.concatenate(encoded([" " + " ".join(bundled_prose().split())]))
        self.noise = np.tile(encoded([templates.NOISE])[0], 40)
        self.space, self.full_stop, self.end, self.comma = (self._id(token) for token in ("Ġ", ".", END_OF_TEXT, ","))
        self._digits = {
            count: np.asarray([self._id(f"{number:0{count}}") for number in range(10**count)], np.int32)
            for count in (1, 2, 3)
        }

    def text(self, text: str) -> Tokens:
        """Tokens of a constant text."""
        if text not in self._texts:
            self._texts[text] = np.asarray(self._tokenizer.encode(text).ids, np.int32)
        return self._texts[text]

    def fill(self, template: str, **values: Tokens | str) -> Tokens:
        """Tokens of a template; strings are put in before it is tokenised, tokens after."""
        parts = []
        for part in _fields(template.format_map(_Keep({k: v for k, v in values.items() if isinstance(v, str)}))):
            if part.startswith("{"):
                parts.append(values[part[1:-1]])
            elif part:
                parts.append(self.text(part))
        return np.concatenate(parts)

    def number(self, digits: int, random: np.random.Generator) -> Tokens:
        """A random number with the space before it, first digit not 0: groups of three digits and the rest."""
        value = int(random.integers(10 ** (digits - 1), 10**digits))
        groups = [f"{value}"[at : at + 3] for at in range(0, digits, 3)]
        return np.asarray([self.space, *(self._digits[len(group)][int(group)] for group in groups)], np.int32)

    def filler(self, count: int, kind: str, random: np.random.Generator) -> Tokens:
        """`count` tokens of text in which nothing is asked for."""
        source = {"noise": self.noise, "sentences": self.sentences, "prose": self.prose}[kind]
        start = 0 if kind == "noise" else int(random.integers(source.shape[0]))
        return np.resize(np.roll(source, -start), count) if count > source.shape[0] else _wrap(source, start, count)

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token!r}; documents need the one of training.vocabulary")
        return found


def make_document(pieces: Pieces, length: int, random: np.random.Generator) -> Document:
    """A document of `length` tokens that ends with questions: nearly half of a short one, an eighth of a long one."""
    if length < SHORTEST:
        raise ValueError(f"a document of {length} tokens may have no room for a fact; use {SHORTEST} or more")
    writer = _Writer(pieces, random)
    room = min(int(0.45 * length), 160 + length // 8)
    if random.random() < 0.7:
        writer.add_needles(limit=length - room - 48)
    else:
        writer.add_variables(limit=length - room - 48)
    questions: list[Question] = []
    while room > 0 and len(questions) < MOST_QUESTIONS:
        question = writer.ask(None)
        room -= len(question.prompt) + len(question.answer)
        if room > 0 or not questions:
            questions.append(question)
    tail = [part for question in questions for part in (question.prompt, question.answer)]
    tokens = writer.document(length - sum(map(len, tail)), np.concatenate(tail))
    number = np.full(length, -1, np.int32)
    number[length - sum(map(len, tail)) :] = ASKING
    end = length
    for at in reversed(range(len(questions))):
        number[end - len(questions[at].answer) : end] = at
        end -= len(questions[at].prompt) + len(questions[at].answer)
    return Document(tokens, number, tuple(question.task for question in questions))


def make_prompt(pieces: Pieces, task: str, length: int, random: np.random.Generator) -> tuple[Tokens, Tokens]:
    """A prompt of `length` tokens with one question of a task, and its answer: what the model is evaluated on."""
    writer = _Writer(pieces, random, plain=True)
    limit = length - 128
    if task in ("listing", "hops"):
        writer.add_variables(limit, chains=2)
    else:
        many = int(np.exp(random.uniform(np.log(4), np.log(limit / 24))))  # up to a document of nothing else
        count = {"single": 1, "multikey": many}.get(task, 4)
        writer.add_needles(limit, count=count, repeated=task in ("multivalue", "ordinal"))
    question = writer.ask(task)
    return writer.document(length - len(question.prompt), question.prompt), question.answer


class _Writer:
    """One document in the making: facts, what can be asked about them, and the filler around them."""

    def __init__(self, pieces: Pieces, random: np.random.Generator, plain: bool = False):
        """`plain` keeps to the wording of RULER and to numbers of seven digits."""
        self._pieces, self._random, self._plain = pieces, random, plain
        self._facts: list[Tokens] = []
        self._values: list[tuple[Tokens, list[Tokens]]] = []
        self._chains: list[tuple[Tokens, list[Tokens]]] = []
        self._introduction = "numbers"
        self._thing = "number"
        self._wording = 0 if plain else int(random.choice(3, p=(0.45, 0.2, 0.35)))

    def add_needles(self, limit: int, count: int | None = None, repeated: bool = False) -> None:
        """Numbers (or identifiers) under keys, up to `limit` tokens of them; some keys have several."""
        random, pieces = self._random, self._pieces
        self._thing = "uuid" if not self._plain and random.random() < 0.08 else "number"
        most = count or int(np.exp(random.uniform(0.0, np.log(max(3, limit / 12)))))
        several = 1.0 if repeated else 0.0 if self._plain else random.choice((0.0, 0.5), p=(0.6, 0.4))
        keys = [pieces.keys[at] for at in random.choice(len(pieces.keys), size=most, replace=False)]
        if self._thing == "uuid" and random.random() < 0.5:
            keys = [pieces.identifiers[at] for at in random.choice(_POOL, size=most, replace=False)]
        used, facts = 0, []
        for key in keys:
            values = []
            for _ in range(int(random.integers(2, 5)) if random.random() < several else 1):
                value = self._value()
                fact = pieces.fill(templates.FACTS[self._wording], key=key, value=value, **self._things())
                if used + len(fact) > limit:
                    break
                used += len(fact)
                values.append(value)
                facts.append((len(self._values), fact))
            if not values:
                break
            self._values.append((key, values))
        # Facts of different keys in any order, those of one key in the order of its values.
        order = np.asarray([owner for owner, _ in facts])[random.permutation(len(facts))]
        left = {owner: iter([fact for other, fact in facts if other == owner]) for owner in set(order.tolist())}
        self._facts = [next(left[owner]) for owner in order.tolist()]
        if len(facts) == 1 and self._thing == "number" or self._thing == "uuid":
            self._introduction = self._thing

    def add_variables(self, limit: int, chains: int | None = None) -> None:
        """Chains of assignments: a number to the first variable, each variable to the next."""
        random, pieces = self._random, self._pieces
        self._introduction = "variables"
        count = chains or int(random.integers(1, max(2, min(12, limit // 90)) + 1))
        lengths = [5] * count if self._plain else random.integers(1, 7, size=count).tolist()
        names = iter(pieces.names[at] for at in random.choice(len(pieces.names), size=sum(lengths), replace=False))
        waiting, used = [], 0
        for length in lengths:
            value = pieces.number(5, random)
            members, facts = [], []
            for _ in range(length):
                name = next(names)
                given = pieces.fill(" VAR{name}", name=members[-1]) if members else value
                fact = pieces.fill(templates.ASSIGNMENT, name=name, value=given)
                if used + len(fact) > limit:
                    break
                used += len(fact)
                members.append(name)
                facts.append(fact)
            if members:
                self._chains.append((value, members))
                waiting.append(facts)
        order = random.permutation(np.repeat(np.arange(len(waiting)), [len(facts) for facts in waiting]))
        left = [iter(facts) for facts in waiting]
        self._facts = [next(left[owner]) for owner in order.tolist()]

    def ask(self, task: str | None) -> Question:
        """A question that the facts answer; of any task that they allow, or of the one named."""
        if self._chains:
            task = task or ("listing" if self._random.random() < 0.4 else "hops")
            return self._ask_listing() if task == "listing" else self._ask_hops()
        if task is not None:
            return self._ask_needles(task)
        key, values = self._values[self._random.integers(len(self._values))]
        if len(values) > 1:
            return self._ask_about(key, values, "multivalue" if self._random.random() < 0.3 else "ordinal")
        single = [pair for pair in self._values if len(pair[1]) == 1]
        if len(single) >= 2 and self._thing == "number" and self._random.random() < 0.15:
            return self._ask_several(single)
        return self._ask_about(key, values, "single" if len(self._values) == 1 else "multikey")

    def document(self, length: int, tail: Tokens) -> Tokens:
        """Introduction, `length` tokens of facts in filler with it, and the tail."""
        random, pieces = self._random, self._pieces
        head = pieces.text("")
        if self._plain or random.random() < 0.5:
            head = pieces.text(templates.INTRODUCTIONS[self._introduction])
        kind = ("noise", "sentences", "prose")[random.choice(3, p=(0.35, 0.4, 0.25))]
        count = length - len(head) - sum(map(len, self._facts))
        if count < 0:
            raise ValueError(f"facts and introduction need {-count} tokens more than the {length} that there are")
        filler = pieces.filler(count, kind, random)
        # Between sentences where there are enough of them, else anywhere.
        places = np.flatnonzero(filler == pieces.full_stop) + 1
        places = places if len(places) else np.arange(count + 1)
        cuts = np.sort(places[random.integers(len(places), size=len(self._facts))])
        parts: list[Tokens] = [head]
        for part, fact in zip(np.split(filler, cuts), [*self._facts, pieces.text("")], strict=True):
            parts += [part, fact]
        return np.concatenate([*parts, tail])

    def _ask_needles(self, task: str) -> Question:
        key, values = self._values[self._random.integers(len(self._values))]
        return self._ask_several(self._values) if task == "multiquery" else self._ask_about(key, values, task)

    def _ask_about(self, key: Tokens, values: list[Tokens], task: str) -> Question:
        """The value of a key, all its values, or the one of an ordinal."""
        wordings = templates.QUESTIONS["single" if task == "multikey" else task]
        wording = wordings[min(self._wording, len(wordings) - 1)]
        ordinal = int(self._random.integers(len(values)))
        named = templates.ORDINALS[ordinal]
        if ordinal == len(values) - 1 and (ordinal == 3 or self._random.random() < 0.5):
            named = " last"
        prompt = self._pieces.fill(wording, key=key, ordinal=named, **self._things())
        answer = self._joined(values) if task == "multivalue" else values[ordinal]
        return self._question(prompt, answer, task)

    def _ask_several(self, pairs: list[tuple[Tokens, list[Tokens]]]) -> Question:
        """The values of up to four keys, in the order in which they are asked."""
        count = min(4, len(pairs)) if self._plain else int(self._random.integers(2, min(4, len(pairs)) + 1))
        chosen = [pairs[at] for at in self._random.choice(len(pairs), size=count, replace=False)]
        listed = self._joined([key for key, _ in chosen], last=" and")
        prompt = self._pieces.fill(templates.QUESTIONS["multivalue"][0], key=listed, **self._things())
        return self._question(prompt, self._joined([values[0] for _, values in chosen]), "multiquery")

    def _ask_listing(self) -> Question:
        value, members = self._chains[self._random.integers(len(self._chains))]
        prompt = self._pieces.fill(templates.LISTING, value=value, count=f" {len(members)}")
        return self._question(prompt, np.concatenate(members), "listing")

    def _ask_hops(self) -> Question:
        value, members = self._chains[self._random.integers(len(self._chains))]
        at = len(members) - 1 if self._plain else int(self._random.integers(len(members)))
        wording = templates.HOPS[0 if self._plain else int(self._random.integers(len(templates.HOPS)))]
        return self._question(self._pieces.fill(wording, name=members[at]), value, "hops")

    def _question(self, prompt: Tokens, answer: Tokens, task: str) -> Question:
        ending = np.asarray([self._pieces.full_stop, self._pieces.end], np.int32)
        return Question(prompt, np.concatenate([answer, ending]), task)

    def _joined(self, parts: list[Tokens], last: str = "") -> Tokens:
        """Parts with commas between them, and a word before the last."""
        comma, joined = np.asarray([self._pieces.comma], np.int32), []
        for number, part in enumerate(parts):
            word = self._pieces.text(last) if number and number == len(parts) - 1 else self._pieces.text("")
            joined += [comma, word, part] if number else [part]
        return np.concatenate(joined)

    def _things(self) -> dict[str, str]:
        return {"thing": self._thing, "things": f"{self._thing}s"}

    def _value(self) -> Tokens:
        if self._thing == "uuid":
            return self._pieces.identifiers[self._random.integers(_POOL)]
        digits = 7 if self._plain else int(self._random.choice((7, 7, 7, 3, 5)))
        return self._pieces.number(digits, self._random)


class _Keep(dict):
    """Leaves fields that have no value as they are."""

    def __missing__(self, name: str) -> str:
        return "{" + name + "}"


def _fields(template: str) -> list[str]:
    """A template cut before and after each field."""
    parts, at = [], 0
    while (start := template.find("{", at)) >= 0:
        stop = template.index("}", start) + 1
        parts += [template[at:start], template[start:stop]]
        at = stop
    return [*parts, template[at:]]


def _wrap(source: Tokens, start: int, count: int) -> Tokens:
    """`count` tokens of a source from `start` on, from its beginning again after its end."""
    return np.concatenate([source[start : start + count], source[: max(0, start + count - len(source))]])
