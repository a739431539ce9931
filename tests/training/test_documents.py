"""Synthetic documents: their text is read again, by regular expressions alone, and must hold what the answers say."""

import re

import numpy as np
import pytest

from training.batches import make_stack
from training.documents import ASKING, TASKS, make_document, make_prompt

KEY, VALUE = r"([0-9a-z]+(?:-[0-9a-z]+)+)", r"([0-9a-f-]+)"
FACT = re.compile(rf"special magic (?:number|uuid)s? for {KEY} is: {VALUE}\.|{KEY} is {VALUE}\.")
ASSIGNMENT = re.compile(r"VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d+))\.")
ORDINALS = {"first": 0, "second": 1, "third": 2, "last": -1}


def true_answer(document: str, question: str) -> str:
    """What a reader of the text answers, the answer's order included."""
    values: dict[str, list[str]] = {}
    for long_key, long_value, short_key, short_value in FACT.findall(document):
        values.setdefault(long_key or short_key, []).append(long_value or short_value)
    variables: dict[str, str] = {}
    for name, other, number in ASSIGNMENT.findall(document):
        variables[name] = variables[other] if other else number
    if match := re.search(r"assigned the value (\d+) in the text", question):
        return " ".join(name for name, number in variables.items() if number == match[1])
    if match := re.search(r"VAR ([A-Z]{5})", question):
        return variables[match[1]]
    if match := re.search(r"What are all the special magic \w+ for (.+?) mentioned", question):
        keys = re.split(r", (?:and )?| and ", match[1])
        return ", ".join(value for key in keys for value in values[key])
    match = re.search(r"What is the(?: (\w+))? special magic \w+ for (\S+) mentioned", question)
    if match is None:
        match = re.search(r"()\n (\S+) is(?: (\w+):)?$", question)
        assert match is not None, question
        return values[match[2]][ORDINALS[match[3]] if match[3] else 0]
    return values[match[2]][ORDINALS[match[1]] if match[1] else 0]


@pytest.mark.parametrize("length", [256, 512, 2048])
def test_answers_follow_from_the_text(length, tokenizer, pieces):
    random = np.random.default_rng(length)
    seen = set()
    for _ in range(60):
        document = make_document(pieces, length, random)
        assert document.tokens.shape == document.question.shape == (length,)
        starts = [int(np.flatnonzero(document.question == at)[0]) for at in range(len(document.tasks))]
        previous = None
        for at, start in enumerate(starts):
            own = document.question == at
            answer = tokenizer.decode(document.tokens[own].tolist(), skip_special_tokens=False)
            before = tokenizer.decode(document.tokens[:start].tolist(), skip_special_tokens=False)
            question = before.rsplit("<|endoftext|>", 1)[-1] if at else before[before.rindex("\n") :]
            text = before if previous is None else previous
            previous = text
            assert answer == f" {true_answer(text, question)}.<|endoftext|>", question
            assert (document.question[start - 3 : start] == ASKING).all()
        assert document.question[-1] == len(document.tasks) - 1
        seen.update(document.tasks)
    assert seen == set(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_their_length_and_task(task, tokenizer, pieces):
    random = np.random.default_rng(0)
    for _ in range(20):
        prompt, answer = make_prompt(pieces, task, 768, random)
        assert prompt.shape == (768,)
        text, question = (part for part in tokenizer.decode(prompt.tolist()).rsplit("\n", 1))
        assert tokenizer.decode(answer.tolist()) == f" {true_answer(text, question)}."
        facts = len(FACT.findall(text))
        assert {"single": facts == 1, "multiquery": facts == 4}.get(task, facts != 1)
        if task == "hops":
            assert text.count("VAR") >= 10


def test_seeds_decide(pieces):
    first, again, other = (make_stack(pieces, (2, 3, 256), (seed,)) for seed in (1, 1, 2))
    for one, same, different in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one, same)
        assert (one != different).any()
    tokens, question, tasks = first
    assert tokens.shape == question.shape == (2, 3, 256)
    np.testing.assert_array_equal(question.max(axis=-1) + 1, (tasks >= 0).sum(axis=-1))


def test_too_short_a_document_is_refused(pieces):
    with pytest.raises(ValueError, match="192 tokens"):
        make_document(pieces, 192, np.random.default_rng(0))


def test_the_tokenizer_keeps_text_and_groups_digits(tokenizer):
    for text in ("Any text: naïve café, 世界\n\n\tand  spaces ", " 9f3c2a1b-12ab-4f3c-a123-aabbccddeeff", "VAR XQZPA"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode(" 1234567").tokens == ["Ġ", "123", "456", "7"]
    assert tokenizer.get_vocab_size() == 2048
