"""Scheduling without a model: thousands of random operations leak nothing, and every request ends."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.engine.simulation import SHAPES, Simulation
from uniprefill_jax.config import EngineConfig
from uniprefill_jax.engine.requests import RequestState
from uniprefill_jax.errors import InputError

CONFIG = EngineConfig(page_size=8, pool_pages=90, max_running=4, prefill_chunk=24, max_length=120)


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, step, cancel, exhaust and finish in any order."""

    def __init__(self):
        super().__init__()
        self.simulation = Simulation(CONFIG)

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed):
        self.simulation = Simulation(CONFIG, seed, stops=0.02)

    @rule(
        shape=st.sampled_from(sorted(SHAPES)),
        length=st.integers(1, 70),
        limit=st.integers(1, 40),
        priority=st.integers(0, 2),
        text=st.none() | st.integers(0, 2),
    )
    def submit(self, shape, length, limit, priority, text):
        self.simulation.submit(shape, length, limit, priority, text)

    @rule(length=st.integers(121, 400), limit=st.integers(1, 40))
    def submit_too_long(self, length, limit):
        with pytest.raises(InputError, match="90"):
            self.simulation.submit("dense", length, limit)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.simulation.step()

    @precondition(lambda self: self.simulation.alive)
    @rule(data=st.data())
    def cancel(self, data):
        self.simulation.cancel(data.draw(st.sampled_from(self.simulation.alive)))

    @invariant()
    def books_are_right(self):
        self.simulation.check()

    def teardown(self):
        drain(self.simulation)


def drain(simulation: Simulation) -> None:
    """Step until all requests have ended; then nothing may be held."""
    steps = 0
    while simulation.alive:
        simulation.step()
        steps += 1
        assert steps < 20_000, "the scheduler makes no progress"
    if simulation.scheduler.prefix is not None:
        simulation.scheduler.prefix.clear()
    assert simulation.scheduler.pages.free_pages == CONFIG.pool_pages
    assert simulation.scheduler.pages.reserved_pages == 0
    assert simulation.scheduler.slots.free_slots == CONFIG.max_running


def test_random_operations_leak_nothing():
    before, reused, packed = Simulation.operations, Simulation.reused_tokens, Simulation.packed
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=100, stateful_step_count=60))
    print(f"{Simulation.operations - before} operations, {Simulation.reused_tokens - reused} tokens reused")
    assert Simulation.operations - before >= 10_000
    assert Simulation.reused_tokens - reused >= 1000
    assert Simulation.packed - packed >= 100


def test_first_come_first_served_within_a_priority():
    simulation = Simulation(EngineConfig(page_size=8, pool_pages=90, max_running=1, prefill_chunk=24))
    requests = [simulation.submit("dense", 10, 2, priority) for priority in (1, 0, 1, 0)]
    order = []
    while simulation.alive:
        order += simulation.step().admitted
    assert [requests.index(request) for request in order] == [1, 3, 0, 2]


def test_what_a_drop_leaves_over_is_free_at_once():
    simulation = Simulation(CONFIG)
    request = simulation.submit("discard", 48, 4)
    simulation.step()
    pages, prefix = simulation.scheduler.pages, simulation.scheduler.prefix
    assert pages.used_pages - prefix.evictable_pages == 12 and pages.reserved_pages == 24
    while not request.awaits_drop:
        simulation.step()
    simulation.scheduler.drop_read(request, 9)
    assert pages.used_pages - prefix.evictable_pages == 12 + 4 and pages.reserved_pages == 4
    # A carry request may keep everything at its next drop.
    other = Simulation(CONFIG)
    request = other.submit("carry", 48, 4)
    other.step(), other.step()
    other.scheduler.drop_read(request, 9)
    assert other.scheduler.pages.reserved_pages == 2 * 6


def test_the_last_in_rank_is_preempted_and_goes_on_later():
    simulation = Simulation(EngineConfig(page_size=8, pool_pages=36, max_running=2, prefill_chunk=64))
    first, second = (simulation.submit("dense", 16, 30) for _ in range(2))
    preempted = []
    while simulation.alive:
        preempted += simulation.step().preempted
        if first.ended:
            break
    assert preempted and set(preempted) == {second}
    assert not second.ended and len(second.generated) >= 1
    known = len(second.generated)
    while simulation.alive:
        simulation.step()
    assert len(second.generated) >= known and second.state is RequestState.FINISHED


def test_a_request_longer_than_the_pool_is_refused_with_the_numbers():
    simulation = Simulation(CONFIG)
    with pytest.raises(
        InputError, match=r"96 pages \(6 attention layers x 121 tokens in pages of 8\), the pool has 90"
    ):
        simulation.submit("dense", 100, 22)
    assert not simulation.requests
    # The last token is drawn and not fed back: it needs no room.
    simulation.submit("dense", 100, 21)
    drain(simulation)
