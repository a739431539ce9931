"""The probes' prompts, whatever the model, and their run on the packaged SmolLM2-135M."""

import random
from pathlib import Path

import pytest

import uniprefill_jax as up
from uniprefill_jax.eval.probes import PROBES, Asker, parse_probes, probe_cases
from uniprefill_jax.eval.prose import Prose
from uniprefill_jax.tokenizer import Tokenizer

LENGTH = 640


@pytest.fixture(scope="module")
def prose(tokenizer: Tokenizer) -> Prose:
    return Prose(tokenizer)


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_hold_the_answer_once_and_keep_their_length(tokenizer: Tokenizer, prose: Prose, chat: bool):
    cases = probe_cases(Asker(tokenizer, chat), prose, list(PROBES), [LENGTH], 4, seed=1)
    assert len(cases) == 4 * len(PROBES) and len({case.key for case in cases}) == len(cases)
    for case in cases:
        whole = len(case.prompt) + (len(case.continuation) if case.metric == "loss" else case.max_tokens)
        # Of a second question the prompt ends with the first.
        assert LENGTH * 0.85 < whole <= LENGTH, case.task
        if case.task not in ("few_shot", "prose_loss"):
            assert tokenizer.decode(case.prompt).count(case.references[0]) == 1
    assert cases == probe_cases(Asker(tokenizer, chat), prose, list(PROBES), [LENGTH], 4, seed=1)
    assert cases != probe_cases(Asker(tokenizer, chat), prose, list(PROBES), [LENGTH], 4, seed=2)


def test_a_later_turn_is_put_as_the_template_puts_it(tokenizer: Tokenizer):
    from uniprefill_jax.eval.probes import Question

    asker = Asker(tokenizer, chat=True)
    first, second = Question("Who?", "It was"), Question("When?", "It was in")
    fed = tokenizer.decode(asker.ask(first) + asker.ask_again("Rollo", second), skip_special_tokens=False)
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": " It was Rollo."},
        {"role": "user", "content": "When?"},
    ]
    expected = tokenizer.decode(tokenizer.apply_chat_template(messages), skip_special_tokens=False)
    assert fed == f"{expected} It was in"
    plain = Asker(tokenizer, chat=False)
    fed = tokenizer.decode(plain.ask(first) + plain.ask_again("Rollo", second))
    assert fed == "Who?\nIt was Rollo\n\nWhen?\nIt was in"


def test_needles_lie_between_sentences_of_a_stretch(prose: Prose):
    draw = random.Random(3)
    text = prose.haystack(300, ["First needle here.", "Second needle here."], draw)
    assert text.count("needle here.") == 2
    around = [part.strip()[-1:] for part in text.replace("Second needle", "First needle").split("First needle")[:-1]]
    assert all(end in ".!?;" for end in around if end)
    assert abs(len(prose.tokenizer.encode(text)) - 300) < 12


def test_what_cannot_be_asked(tokenizer: Tokenizer, prose: Prose, tmp_path: Path):
    asker = Asker(tokenizer, chat=True)
    with pytest.raises(up.InputError, match="with --prose"):
        probe_cases(asker, prose, ["prose_loss"], [100_000], 1, seed=1)
    with pytest.raises(up.InputError, match="at least 512"):
        probe_cases(asker, prose, ["prose_loss"], [256], 1, seed=1)
    with pytest.raises(up.InputError, match="names 'unknown'"):
        parse_probes("few_shot,unknown")
    (tmp_path / "latin.txt").write_bytes("Ärger".encode("latin-1"))
    with pytest.raises(up.InputError, match="not UTF-8"):
        Prose(tokenizer, tmp_path / "latin.txt")
