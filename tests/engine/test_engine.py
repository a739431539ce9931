"""The engine end to end on a tiny model: who shares the batch, is cancelled or preempted, changes nobody's tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import uniprefill_jax as up
from tests.engine.tiny import CONFIG, DROPPING, assert_nothing_held, poisoned_engine, prompt, run, tiny
from tests.parity.compare import relative_error
from uniprefill_jax.engine.decode_steps import SlotNumbers, draw_tokens
from uniprefill_jax.sampling import SamplingKind, SamplingNumbers, sample

DENSE = up.UniPrefillConfig.dense()
# Two sizes of row buffers: up to 64 rows and up to 256.
LENGTHS = (190, 1, 33, 64, 129, 256 - 40, 150, 17, 160, 48, 16, 5)
# Two of three begin alike.
TEXT = prompt(256, 100)
SHARED = [length * 3 // 4 if number % 3 else 0 for number, length in enumerate(LENGTHS)]
PROMPTS = [
    TEXT[:shared] + prompt(length - shared, seed)
    for seed, (length, shared) in enumerate(zip(LENGTHS, SHARED, strict=True))
]


@pytest.fixture(scope="module")
def llm():
    return tiny("llama")


@pytest.fixture(scope="module")
def completions(llm):
    """Greedy completions of every prompt, with and without dropping."""
    sampling = up.SamplingConfig(max_tokens=40)
    # At a mass this close to 1 every block stays: what dense gives, by the program that is compiled already.
    whole = llm.generate(PROMPTS, replace(DROPPING, top_p=0.9999999), sampling)
    for completion in whole:
        assert len(set(completion.prefill.segment_lengths)) == 1
    return {DROPPING: llm.generate(PROMPTS, DROPPING, sampling), DENSE: whole}


@pytest.fixture(scope="module")
def expected(completions):
    """Their tokens; shorter generations are beginnings of these."""
    return {config: [completion.token_ids for completion in own] for config, own in completions.items()}


@pytest.mark.parametrize("chunk", [64, 37])
def test_many_concurrent_requests_equal_generate(llm, completions, chunk):
    """More requests than slots, of all lengths, dropping and dense ones side by side, ending at different times."""
    engine = poisoned_engine(llm, replace(CONFIG, prefill_chunk=chunk))
    wanted: dict[int, up.Completion] = {}
    lengths: dict[int, int] = {}
    for number in range(len(PROMPTS)):
        config, length = (DENSE, DROPPING)[number % 3 > 0], (40, 25, 7, 1)[number % 4]
        request = engine.submit(PROMPTS[number], config, up.SamplingConfig(max_tokens=length), report=True)
        wanted[request], lengths[request] = completions[config][number], length
    events = []
    tokens = run(engine, events)
    for request, completion in wanted.items():
        assert tokens[request] == completion.token_ids[: lengths[request]]
        report = engine.take_report(request)
        assert relative_error(report.logits, completion.prefill.logits) <= 1e-5
        for layer, kept in report.kept_positions.items():
            np.testing.assert_array_equal(kept, completion.prefill.kept_positions[layer])
    finished = {event.request_id: event for event in events if event.kind == "finished"}
    assert sorted(finished) == sorted(wanted)
    assert all(event.finish_reason == "length" for event in finished.values())
    assert finished[0].kept_fraction == 1.0 and finished[1].kept_fraction == 1.0
    assert finished[5].kept_fraction < 0.95
    assert engine.stats().finished == len(wanted) and engine.stats().preemptions == 0


def test_decoding_goes_on_while_a_prompt_is_prefilled(llm):
    engine = poisoned_engine(llm)
    running = engine.submit(PROMPTS[11], DROPPING, up.SamplingConfig(max_tokens=40))
    for _ in range(3):
        engine.step()
    long = engine.submit(PROMPTS[0], DROPPING, up.SamplingConfig(max_tokens=2))
    gaps = []
    while True:
        events = engine.step()
        if any(event.request_id == long for event in events):
            break
        gaps.append(sum(event.request_id == running for event in events))
    # 190 tokens take three chunks in the first segment alone; no step of them went by without a token.
    assert len(gaps) >= 5 and all(count == 1 for count in gaps)
    run(engine)


def test_preempted_requests_get_the_same_tokens(llm, expected):
    engine = poisoned_engine(llm)
    pages = engine.scheduler.pages
    # Room for the prompts of several requests, not for all that they generate.
    pages.reserve(CONFIG.pool_pages - 50)
    numbers = (10, 11, 7, 2)
    sampling = up.SamplingConfig(max_tokens=40)
    wanted = {engine.submit(PROMPTS[n], DROPPING, sampling): expected[DROPPING][n] for n in numbers}
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.kind == "token":
                tokens.setdefault(event.request_id, []).append(event.token)
    assert engine.stats().preemptions >= 2
    assert tokens == wanted
    pages.release(CONFIG.pool_pages - 50)
    assert_nothing_held(engine)


def test_cancelling_at_any_point_frees_everything(llm, expected):
    for steps in (0, 1, 2, 3, 4, 5, 6, 9, 14):
        engine = poisoned_engine(llm)
        gone = engine.submit(PROMPTS[6], DROPPING, up.SamplingConfig(max_tokens=30))
        stays = engine.submit(PROMPTS[3], DROPPING, up.SamplingConfig(max_tokens=12))
        seen = [event for _ in range(steps) for event in engine.step()]
        assert engine.cancel(gone) and not engine.cancel(gone)
        assert engine.stats().cancelled == 1
        later = []
        run(engine, later)
        assert all(event.request_id != gone for event in later)
        tokens = [event.token for event in seen + later if event.kind == "token" and event.request_id == stays]
        assert tokens == expected[DROPPING][3][:12]
    assert not engine.cancel(12345)


@pytest.mark.slow
def test_draws_equal_generate(llm):
    samplings = [
        up.SamplingConfig(max_tokens=12, temperature=0.9, seed=5),
        up.SamplingConfig(max_tokens=12, temperature=1.3, seed=6, top_k=20, top_p=0.9),
        up.SamplingConfig(max_tokens=12),
    ]
    engine = poisoned_engine(llm)
    wanted = {
        engine.submit(PROMPTS[number], DROPPING, sampling): llm.generate([PROMPTS[number]], DROPPING, sampling)[0]
        for number, sampling in zip((7, 10, 2), samplings, strict=True)
    }
    assert run(engine) == {number: completion.token_ids for number, completion in wanted.items()}


def test_every_row_is_drawn_by_its_own_setting():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, 50), dtype=np.float32))
    samplings = [
        up.SamplingConfig(temperature=0.9, seed=5),
        up.SamplingConfig(temperature=1.3, seed=6, top_k=20, top_p=0.9),
        up.SamplingConfig(temperature=0.7, seed=6, top_p=0.5),
        up.SamplingConfig(),
    ]
    numbers = SlotNumbers(*map(np.stack, zip(*map(SamplingNumbers.of, samplings), strict=True)))
    steps = np.asarray([3, 1, 7, 2], np.int32)
    drawn = jax.jit(draw_tokens, static_argnums=0)(True, logits, numbers, steps)
    draw_one = jax.jit(sample, static_argnames="kind")
    for row, sampling in enumerate(samplings):
        kind, own = SamplingKind.of(sampling), SamplingNumbers.of(sampling)
        assert drawn[row] == draw_one(logits[row][None], kind=kind, numbers=own, step=steps[row])[0]
    assert draw_tokens(False, logits, numbers, steps).tolist() == logits.argmax(-1).tolist()


def test_an_end_token_ends_a_request_and_frees_its_pages(llm, expected, monkeypatch):
    tokens = expected[DROPPING][3]
    end = next(token for place, token in enumerate(tokens) if place >= 3 and token not in tokens[:place])

    class Words:
        eos_token_ids = (end,)

        def stream_decoder(self):
            return self

        def push(self, token):
            return f"{token} "

        def finish(self):
            return ""

    monkeypatch.setattr(llm, "tokenizer", Words())
    engine = poisoned_engine(llm)
    number = engine.submit(PROMPTS[3], DROPPING, up.SamplingConfig(max_tokens=40))
    events = []
    assert run(engine, events)[number] == tokens[: tokens.index(end) + 1]
    assert events[-1].kind == "finished" and events[-1].finish_reason == "stop"
    text = "".join(event.text for event in events)
    assert text == "".join(f"{token} " for token in tokens[: tokens.index(end)])


def test_log_probabilities_are_those_of_the_model_read_anew(llm):
    """One request asks for them, another shares its steps and does not; tokens are drawn at a temperature."""
    engine = poisoned_engine(llm)
    sampling = up.SamplingConfig(max_tokens=6, temperature=0.8, seed=3)
    asks = engine.submit(PROMPTS[7], DENSE, sampling, logprobs=3)
    engine.submit(PROMPTS[9], DENSE, up.SamplingConfig(max_tokens=9))
    events = []
    tokens = run(engine, events)[asks]
    reported = [event for event in events if event.kind == "token" and event.request_id == asks]
    read = llm.prefill([PROMPTS[7] + tokens[:count] for count in range(6)], DENSE)
    for event, result in zip(reported, read, strict=True):
        logits = result.logits.astype(np.float64)
        truth = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert event.logprob == pytest.approx(truth[event.token], abs=1e-4)
        order = np.argsort(-truth)[:3]
        assert [token for token, _ in event.alternatives] == order.tolist()
        assert [value for _, value in event.alternatives] == pytest.approx(truth[order], abs=1e-4)
    assert all(event.alternatives == () for event in events if event.request_id != asks)
    with pytest.raises(up.ConfigError, match="logprobs is 21"):
        engine.submit([1], logprobs=21)


def test_most_tokens_is_what_is_accepted(llm):
    small = up.Engine(llm, up.EngineConfig(page_size=16, pool_pages=22, max_running=2, max_length=256))
    assert small.most_tokens(40) == 64 - 40 + 1
    small.submit(prompt(40), DENSE, up.SamplingConfig(max_tokens=small.most_tokens(40)))
    with pytest.raises(up.InputError, match="has 22"):
        small.submit(prompt(40), DENSE, up.SamplingConfig(max_tokens=small.most_tokens(40) + 1))
    assert poisoned_engine(llm).most_tokens(256) == 1


def test_priority_and_arrival_decide_who_goes_first(llm):
    engine = poisoned_engine(llm)
    sampling = up.SamplingConfig(max_tokens=1)
    late, first, second = (engine.submit(PROMPTS[6], DENSE, sampling, priority=p) for p in (1, 0, 0))
    order = []
    while engine.has_work:
        order += [event.request_id for event in engine.step() if event.kind == "finished"]
    assert order == [first, second, late]


def test_impossible_requests_are_refused_with_the_numbers(llm):
    engine = poisoned_engine(llm)
    with pytest.raises(up.InputError, match="257 tokens, the engine takes at most 256"):
        engine.submit(prompt(257), DENSE)
    with pytest.raises(up.InputError, match="empty"):
        engine.submit([])
    with pytest.raises(up.InputError, match="vocabulary"):
        engine.submit([96])
    with pytest.raises(up.ConfigError, match="layer 4"):
        engine.submit([1], up.UniPrefillConfig(drop_layers=(4,)))
    with pytest.raises(up.InputError, match="tokenizer"):
        engine.submit([1], None, up.SamplingConfig(stop=("x",)))
    small = up.Engine(llm, up.EngineConfig(page_size=16, pool_pages=20, max_running=2, max_length=256))
    with pytest.raises(up.InputError, match="needs up to 30 pages .* has 20"):
        small.submit(prompt(80), DENSE, up.SamplingConfig(max_tokens=16))
    assert not engine.has_work and not small.has_work
    # A request that reaches the longest length ends there.
    number = engine.submit(prompt(250), DENSE, up.SamplingConfig(max_tokens=100))
    assert len(run(engine)[number]) == 7


@pytest.mark.parametrize(
    "wrong", [{"page_size": 24}, {"pool_pages": 0}, {"max_running": -1}, {"prefill_chunk": 1.5}, {"max_length": True}]
)
def test_wrong_engine_settings(wrong):
    with pytest.raises(up.ConfigError, match=next(iter(wrong))):
        up.EngineConfig(**wrong)


def test_random_operations_give_everybody_their_own_tokens(llm, expected):
    class EngineMachine(RuleBasedStateMachine):
        """Submit, step, cancel and exhaust in any order; whatever comes of a request is a beginning of its tokens."""

        def __init__(self):
            super().__init__()
            self.engine = poisoned_engine(llm)
            self.wanted: dict[int, list[int]] = {}
            self.tokens: dict[int, list[int]] = {}
            self.withheld = 0

        @rule(
            number=st.integers(0, len(PROMPTS) - 1),
            config=st.sampled_from([DROPPING, DENSE]),
            length=st.integers(1, 40),
            priority=st.integers(0, 1),
        )
        def submit(self, number, config, length, priority):
            sampling = up.SamplingConfig(max_tokens=length)
            request = self.engine.submit(PROMPTS[number], config, sampling, priority=priority)
            self.wanted[request] = expected[config][number][:length]
            self.tokens[request] = []

        @rule(count=st.integers(1, 12))
        def step(self, count):
            for _ in range(count):
                for event in self.engine.step():
                    if event.kind == "token":
                        self.tokens[event.request_id].append(event.token)
                    if event.kind == "finished":
                        assert self.tokens.pop(event.request_id) == self.wanted.pop(event.request_id)

        @precondition(lambda self: self.wanted)
        @rule(data=st.data())
        def cancel(self, data):
            request = data.draw(st.sampled_from(sorted(self.wanted)))
            assert self.engine.cancel(request)
            wanted, tokens = self.wanted.pop(request), self.tokens.pop(request)
            assert tokens == wanted[: len(tokens)]

        @rule(left=st.integers(0, 60))
        def exhaust(self, left):
            pages = self.engine.scheduler.pages
            more = max(pages.available_pages - left, 0)
            pages.reserve(more)
            self.withheld += more

        @rule()
        def recover(self):
            self.engine.scheduler.pages.release(self.withheld)
            self.withheld = 0

        def teardown(self):
            self.recover()
            while self.wanted:
                self.step(1)
            assert_nothing_held(self.engine)
            reused.append(self.engine.stats().prefix_hit_tokens)
            self.engine.forget_prefixes()
            assert self.engine.scheduler.pages.free_pages == CONFIG.pool_pages
            assert all(np.isnan(pages).all() for pages in (self.engine.executor.pools.keys,))

    reused = []
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=12, stateful_step_count=25))
    assert sum(reused) > 0
