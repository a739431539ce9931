"""An engine that follows is given every call of the one that leads, and comes to the same."""

import pytest

import uniprefill_jax as up
from tests.engine.tiny import CONFIG, DROPPING, prompt, tiny
from uniprefill_jax.engine import leading as module
from uniprefill_jax.engine.executor import Executor
from uniprefill_jax.engine.leading import follow, leading

DENSE = up.UniPrefillConfig.dense()
GREEDY = up.SamplingConfig(max_tokens=4, ignore_eos=True)


class Recorded:
    """Announcements that are heard after the run."""

    messages: list[bytes] = []

    def send(self, message: bytes) -> None:
        """Keep it."""
        self.messages.append(message)

    def receive(self) -> bytes:
        """The next one."""
        return self.messages.pop(0)


@pytest.fixture
def following(monkeypatch):
    """The engines that processes other than the first made, and the events of all their steps."""
    engines, events = [], []

    class Following(up.Engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            engines.append(self)

        def step(self):
            events.extend(found := super().step())
            return found

    monkeypatch.setattr(Recorded, "messages", [])
    monkeypatch.setattr(module, "Announcements", Recorded)
    # Several processes wait for every drop, however fast their devices are.
    monkeypatch.setattr(Executor, "drop_is_ready", lambda *arguments: True)
    monkeypatch.setattr(module, "Engine", Following)
    return engines, events


def test_a_follower_repeats_everything(following):
    engines, heard = following
    llm, events = tiny("llama"), []
    with leading(llm, CONFIG) as engine:
        engine.limit_step(32)
        first = engine.submit(prompt(100), DROPPING, GREEDY, report=True)
        gone = engine.submit(prompt(60, 1), DENSE, GREEDY, priority=1)
        with pytest.raises(up.InputError):
            engine.submit(prompt(300), DROPPING, GREEDY)
        events += engine.step()
        assert engine.cancel(gone) and not engine.cancel(gone)
        last = engine.submit(prompt(100), DROPPING, up.SamplingConfig(max_tokens=3, temperature=1.0, seed=7))
        while engine.has_work:
            events += engine.step()
        engine.take_report(first)
        engine.forget_prefixes()
        engine.limit_step()
    assert {event.request_id for event in events} == {first, last}
    follow(llm)
    (follower,) = engines
    assert heard == events
    assert not follower.has_work and not follower._reports
    assert follower.scheduler.budget == engine.scheduler.budget == CONFIG.prefill_chunk
    ours, theirs = engine.stats(), follower.stats()
    for name in ("finished", "cancelled", "pages_in_use", "pages_cached", "slots_in_use"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert Recorded.messages == []


def test_followers_are_let_go_though_the_work_fails(following):
    llm = tiny("llama")
    with pytest.raises(ZeroDivisionError), leading(llm, CONFIG) as engine:
        engine.submit(prompt(20), DENSE, GREEDY)
        raise ZeroDivisionError
    follow(llm)
    assert following[0][0].has_work
