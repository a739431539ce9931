"""Harder probes for a method that trusts the last queries: what is needed later is not what they ask for.

    question_last       a fact in prose, asked for at the end: the control
    second_question     two facts; after the answer about one, a later turn asks for the other
    question_first      the question before the document, nothing but the answer's start after it
    no_overlap          the question shares no word with the fact that answers it
    instructions_first  a list of rules before the document, one of them asked for at the end
    few_shot            labelled examples fill the prompt; the label of one more word is asked for
    prose_loss          loss, in nats per token, of the prose that follows the prompt

Prompts are drawn anew from a seed, task, length and number: no data is needed but a text.
"""

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from uniprefill_jax.errors import InputError
from uniprefill_jax.eval.cases import Case, parse_names
from uniprefill_jax.eval.prose import Prose
from uniprefill_jax.tokenizer import Tokenizer

ANSWER_TOKENS = 16
LOSS_TOKENS = 1024
LOSS_SHARE = 4  # a short prompt gives up no more than a quarter of its length to the loss
ROOM = 64  # for a chat template, and for what splitting and joining text adds
NUM_RULES = 16
SINK_RULES = 10  # that may lie among the first tokens, which always stay
MOST_DRAWS = 50  # of few-shot examples per 8 tokens of prompt

# Things that have a number, and a question for it that shares no content word with the statement.
_PARAPHRASES = (
    ("The physician lives in house {value}.", "At which street address is the doctor's home?"),
    ("To open the safe, dial {value}.", "What is the combination of the strongbox?"),
    ("The vessel carried {value} barrels of wine.", "How many casks were in the ship's cargo?"),
    ("Her salary amounted to {value} crowns.", "How much money did the woman earn?"),
    ("The infant weighed {value} grams at birth.", "How heavy was the newborn baby?"),
    ("The king's army numbered {value} men.", "How many soldiers served the monarch?"),
    ("The bridge is {value} feet long.", "What distance does the river crossing span?"),
    ("The thief was inmate {value}.", "Under which number was the robber jailed?"),
    ("A ticket for the journey cost {value} pence.", "What was the fare of the trip?"),
    ("The library owns {value} volumes.", "How large is the collection of books?"),
    ("The village has {value} inhabitants.", "How many people dwell in the small town?"),
    ("The mountain rises {value} feet above the sea.", "What is the height of the peak?"),
)
_PLACES = ("harbour", "abbey", "mill", "orchard", "quarry", "lighthouse", "brewery", "chapel", "foundry", "tannery")
_TOPICS = (
    *("wool", "salt", "timber", "copper", "honey", "linen", "barley", "amber", "candles", "leather", "paper", "tin"),
    *("silk", "pepper", "oil", "glass", "rope", "coal", "hops", "cheese", "dye", "flour", "iron", "marble"),
)
_CATEGORIES = {
    "animal": "horse dog cat cow sheep goat wolf bear fox deer mouse lion tiger camel donkey rabbit otter badger",
    "food": "bread cheese butter apple pear cake soup rice honey plum grape onion carrot bean pie egg milk peach",
    "tool": "hammer saw axe shovel knife chisel drill wrench rake plough anvil file needle scissors ladder hoe pick",
    "garment": "coat shirt hat glove boot scarf dress cloak sock belt apron jacket skirt shoe hood vest robe cap",
}


@dataclass(frozen=True)
class Question:
    """One turn of a user, and how the answer to it begins.

    Attributes:
        text: what the user says.
        answer_start: the first words of the answer, which are given.
    """

    text: str
    answer_start: str


class Asker:
    """Makes token ids of turns: through the chat template, or as plain text for a base model."""

    def __init__(self, tokenizer: Tokenizer, chat: bool):
        self.tokenizer = tokenizer
        self.chat = chat

    def ask(self, question: Question) -> tuple[int, ...]:
        """One turn, up to where the answer goes on."""
        if self.chat:
            turn = self.tokenizer.apply_chat_template([{"role": "user", "content": question.text}])
            return (*turn, *self._continue(f" {question.answer_start}"))
        return tuple(self.tokenizer.encode(f"{question.text}\n{question.answer_start}"))

    def ask_again(self, answer: str, question: Question) -> tuple[int, ...]:
        """What follows a first turn: the rest of its answer, and another turn.

        Raises:
            InputError: the chat template rewrites earlier turns when a later one is added.
        """
        if not self.chat:
            return self._continue(f" {answer}\n\n{question.text}\n{question.answer_start}")
        opening = [{"role": "user", "content": "?"}]
        turns = [*opening, {"role": "assistant", "content": "!"}, {"role": "user", "content": question.text}]
        head, whole = (self.tokenizer.apply_chat_template(messages) for messages in (opening, turns))
        said = list(self._continue("!"))
        if whole[: len(head) + len(said)] != head + said:
            raise InputError("this chat template does not keep earlier turns as they were; use --no-chat")
        rest = whole[len(head) + len(said) :]
        return (*self._continue(f" {answer}."), *rest, *self._continue(f" {question.answer_start}"))

    def _continue(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class Maker:
    """What a probe makes cases with."""

    asker: Asker
    prose: Prose

    def text_tokens(self, length: int, *others: str) -> int:
        """Tokens that are left for the document in a prompt of `length` with these other texts."""
        tokenizer = self.prose.tokenizer
        return length - ANSWER_TOKENS - ROOM - sum(len(tokenizer.encode(text)) for text in others)

    def question_last(self, length: int, draw: random.Random) -> dict:
        """A fact in prose, asked for at the end."""
        (place, *_), (value, *_) = _places(draw), _values(draw)
        question = _about(place)
        text = self.prose.haystack(self.text_tokens(length, question.text), [_fact(place, value)], draw)
        return {"prompt": self.asker.ask(_after(text, question)), "references": (value,)}

    def second_question(self, length: int, draw: random.Random) -> dict:
        """Two facts; the second is asked for after the answer about the first."""
        (first, second, *_), (answer, value, *_) = _places(draw), _values(draw)
        needles = [_fact(first, answer), _fact(second, value)]
        question = _about(first)
        text = self.prose.haystack(self.text_tokens(length, question.text), needles, draw)
        return {
            "prompt": self.asker.ask(_after(text, question)),
            "continuation": self.asker.ask_again(answer, _about(second)),
            "references": (value,),
        }

    def question_first(self, length: int, draw: random.Random) -> dict:
        """The question, then the document."""
        (place, *_), (value, *_) = _places(draw), _values(draw)
        question = _about(place)
        text = self.prose.haystack(self.text_tokens(length, question.text), [_fact(place, value)], draw)
        opening = f"{question.text} Answer from this text:"
        prompt = self.asker.ask(Question(f"{opening}\n\n{text}", "The number asked for is"))
        return {"prompt": prompt, "references": (value,)}

    def no_overlap(self, length: int, draw: random.Random) -> dict:
        """A fact in other words than the question's, among facts of the same kind."""
        chosen, values = draw.sample(_PARAPHRASES, 3), _values(draw)
        needles = [statement.format(value=value) for (statement, _), value in zip(chosen, values, strict=False)]
        question = Question(f"{chosen[0][1]} Answer with the number alone.", "The number is")
        text = self.prose.haystack(self.text_tokens(length, question.text), needles, draw)
        return {"prompt": self.asker.ask(_after(text, question)), "references": (values[0],)}

    def instructions_first(self, length: int, draw: random.Random) -> dict:
        """Rules before the document; beyond the sink tokens, which always stay, lies the one that is asked for."""
        topics, values = draw.sample(_TOPICS, NUM_RULES), _values(draw, NUM_RULES)
        rules = [f"If the topic is {topic}, the reply is {value}." for topic, value in zip(topics, values, strict=True)]
        asked = draw.randrange(SINK_RULES, NUM_RULES)
        question = Question(f"Now the topic is {topics[asked]}.", f"The topic is {topics[asked]}, the reply is")
        opening = "Follow these rules. " + " ".join(rules)
        text = self.prose.haystack(self.text_tokens(length, question.text, opening), [], draw)
        return {"prompt": self.asker.ask(_after(f"{opening}\n\n{text}", question)), "references": (values[asked],)}

    def few_shot(self, length: int, draw: random.Random) -> dict:
        """Examples of kinds of things with made-up labels; one more thing."""
        kinds = {kind: words.split() for kind, words in _CATEGORIES.items()}
        labels = {kind: _letters(draw) for kind in kinds}
        asked = draw.choice(sorted(kinds))
        word = kinds[asked].pop(draw.randrange(len(kinds[asked])))
        examples = []
        for _ in range(MOST_DRAWS * length // 8):
            kind = draw.choice(sorted(kinds))
            examples.append(f"{draw.choice(kinds[kind])} -> {labels[kind]}")
        per_example = len(self.prose.tokenizer.encode("\n".join(examples[:200]))) / min(len(examples), 200)
        count = int(self.text_tokens(length) / per_example)
        text = "\n".join(examples[:count])
        return {"prompt": self.asker.ask(Question(text, f"{word} ->")), "references": (labels[asked],)}

    def prose_loss(self, length: int, draw: random.Random) -> dict:
        """Prose, and what follows it."""
        scored = min(LOSS_TOKENS, length // LOSS_SHARE)
        stretch = self.prose.stretch(length - 1, draw)
        start = tuple(self.prose.tokenizer.encode(""))  # what begins every text, if anything does
        return {
            "prompt": (*start, *stretch[:-scored]),
            "continuation": tuple(stretch[-scored:]),
            "references": (),
            "metric": "loss",
            "max_tokens": 1,
        }


PROBES: dict[str, Callable[[Maker, int, random.Random], dict]] = {
    make.__name__: make
    for make in (
        Maker.question_last,
        Maker.second_question,
        Maker.question_first,
        Maker.no_overlap,
        Maker.instructions_first,
        Maker.few_shot,
        Maker.prose_loss,
    )
}
SHORTEST = 512


def parse_probes(text: str) -> list[str]:
    """The probes that a user wrote: "all", or names separated by commas.

    Raises:
        InputError: an unknown name.
    """
    return parse_names(text, PROBES)


def probe_cases(
    asker: Asker, prose: Prose, names: Sequence[str], lengths: Sequence[int], samples: int, seed: int
) -> list[Case]:
    """Cases of the probes, by length and task.

    Raises:
        InputError: a length below 512, or beyond the prose.
    """
    short = next((length for length in lengths if length < SHORTEST), None)
    if short is not None:
        raise InputError(f"--lengths has {short}; probes need at least {SHORTEST} tokens")
    maker = Maker(asker, prose)
    return [
        Case(
            **{"task": name, "length": length, "index": index, "metric": "all", "max_tokens": ANSWER_TOKENS}
            | PROBES[name](maker, length, random.Random(f"{seed} {name} {length} {index}"))
        )
        for length in lengths
        for name in names
        for index in range(samples)
    ]


def _fact(place: str, value: str) -> str:
    return f"The special magic number for the {place} is {value}."


def _about(place: str) -> Question:
    return Question(
        f"What is the special magic number for the {place}?", f"The special magic number for the {place} is"
    )


def _after(text: str, question: Question) -> Question:
    return Question(f"{text}\n\n{question.text}", question.answer_start)


def _places(draw: random.Random) -> list[str]:
    return draw.sample(_PLACES, len(_PLACES))


def _values(draw: random.Random, count: int = 4) -> list[str]:
    return [str(draw.randint(10**6, 10**7 - 1)) for _ in range(count)]


def _letters(draw: random.Random) -> str:
    """A label that means nothing."""
    return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(2)) + draw.choice(
        string.digits[1:]
    )
