"""Answers through OpenAI's own client equal what the engine generates, whole and streamed, alone and in company."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import uniprefill_jax as up
from tests.engine.tiny import DROPPING, prompt
from tests.serve.model import ENGINE, NAME, alone, ask, byte_llm, client, metric, nothing_held, tiny_server, wait_until

DENSE = up.UniPrefillConfig.dense()
MESSAGES = [{"role": "developer", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "1 2?"}]}]
# Another number for every byte: most of the text that comes of it is no whole character.
DRAWN = {"temperature": 1.0, "seed": 11, "max_tokens": 40}


@pytest.fixture(scope="module")
def llm():
    return byte_llm()


@pytest.fixture(scope="module")
def server():
    with tiny_server() as running:
        yield running


@pytest.fixture(scope="module")
def api(server):
    with client(server) as own:
        yield own


@pytest.fixture(scope="module")
def chat_ids(llm):
    return llm.tokenizer.apply_chat_template([{"role": "system", "content": "ab"}, {"role": "user", "content": "1 2?"}])


def test_chat_whole_and_streamed(api, llm, chat_ids):
    wanted = alone(chat_ids, **DRAWN)
    answer = api.chat.completions.create(model=NAME, messages=MESSAGES, **DRAWN)
    assert answer.object == "chat.completion" and answer.model == NAME
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.text)
    assert choice.finish_reason == wanted.finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(chat_ids), len(wanted.token_ids))

    stream = api.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **DRAWN
    )
    *chunks, last = stream
    assert last.choices == [] and last.usage.completion_tokens == answer.usage.completion_tokens
    # The second time all but the last tokens, whose queries score the prompt, are there already.
    reusable = max(len(chat_ids) - DROPPING.window_tokens, 0) // ENGINE.page_size * ENGINE.page_size
    assert last.usage.prompt_tokens_details.cached_tokens >= reusable
    assert all(chunk.usage is None and chunk.id == last.id and chunk.object.endswith(".chunk") for chunk in chunks)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(deltas) == wanted.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason
    # A character comes with its last byte: what replaces broken ones is only where the whole text has it.
    assert sum(delta.count("\N{REPLACEMENT CHARACTER}") for delta in deltas) == wanted.text.count(
        "\N{REPLACEMENT CHARACTER}"
    )


def test_completions_take_texts_token_ids_and_lists_of_them(api, llm):
    text, ids = "ab 12 ab", prompt(70, seed=1)
    for asked, prompts in (
        (text, [llm.tokenizer.encode(text)]),
        ([text, "b"], [llm.tokenizer.encode(text), llm.tokenizer.encode("b")]),
        (ids, [ids]),
        ([ids, [7]], [ids, [7]]),
    ):
        answer = api.completions.create(model=NAME, prompt=asked, temperature=0, max_tokens=8)
        wanted = [alone(one, max_tokens=8) for one in prompts]
        assert [choice.text for choice in answer.choices] == [completion.text for completion in wanted]
        assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
    # OpenAI's default is 16 tokens here.
    assert api.completions.create(model=NAME, prompt=[7], temperature=0).usage.completion_tokens == 16


def test_choices_differ_and_a_seed_repeats_them(api, llm, chat_ids):
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 10, "seed": -3, "n": 3, "temperature": 1.2}
    texts = [choice.message.content for choice in api.chat.completions.create(**asked).choices]
    seeds = [(seed - 3) % 2**32 for seed in range(3)]
    assert texts == [alone(chat_ids, max_tokens=10, temperature=1.2, seed=seed).text for seed in seeds]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in api.chat.completions.create(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    unseeded = {
        api.completions.create(model=NAME, prompt="ab", max_tokens=12, extra_body={"top_k": 50}).choices[0].text
        for _ in range(2)
    }
    assert len(unseeded) == 2


def test_stop_strings_end_the_text_and_never_leak(api, llm, chat_ids):
    whole = alone(chat_ids, **DRAWN).text
    # Characters of which the first comes before the rest is known; the other one never comes.
    at = next(n for n in range(4, len(whole) - 2) if whole.find(whole[n : n + 2]) == n)
    stop = [whole[at : at + 2], "never comes"]
    answer = api.chat.completions.create(model=NAME, messages=MESSAGES, stop=stop, **DRAWN)
    assert answer.choices[0].message.content == whole[:at] and answer.choices[0].finish_reason == "stop"
    text = ""
    for chunk in api.chat.completions.create(model=NAME, messages=MESSAGES, stop=stop, stream=True, **DRAWN):
        text += chunk.choices[0].delta.content or ""
        assert whole[:at].startswith(text)
        reason = chunk.choices[0].finish_reason
    assert text == whole[:at] and reason == "stop"


def test_log_probabilities(api, llm, chat_ids):
    wanted = alone(chat_ids, DENSE, logprobs=2, max_tokens=5, temperature=1.0, seed=4)
    drawn = [event.logprob for event in wanted.events if event.kind == "token"]
    best = [[value for _, value in event.alternatives] for event in wanted.events if event.kind == "token"]
    asked = {"model": NAME, "max_tokens": 5, "seed": 4, "extra_body": {"uniprefill": {"enabled": False}}}

    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} | asked
    content = api.chat.completions.create(**chat).choices[0].logprobs.content
    assert [token.logprob for token in content] == drawn
    assert [[top.logprob for top in token.top_logprobs] for token in content] == best
    joined = b"".join(bytes(token.bytes) for token in content)
    assert joined.decode(errors="replace") == wanted.text
    streamed = [
        token
        for chunk in api.chat.completions.create(stream=True, **chat)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == content

    logprobs = api.completions.create(prompt=chat_ids, logprobs=2, **asked).choices[0].logprobs
    assert logprobs.token_logprobs == drawn
    assert [sorted(top.values(), reverse=True) for top in logprobs.top_logprobs] == best
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 5 and logprobs.text_offset[0] == 0
    only = api.completions.create(prompt=chat_ids, logprobs=0, **asked).choices[0].logprobs
    assert only.token_logprobs == logprobs.token_logprobs and set(map(len, only.top_logprobs)) == {0}


def test_concurrent_requests_of_all_lengths_get_what_they_get_alone(server, api, llm):
    """Twelve at a time on four slots, dropping and dense, streamed and whole."""
    before = metric(server, "vllm:request_success_total"), metric(server, "vllm:generation_tokens_total")
    lengths = (200, 3, 120, 64, 17, 230, 90, 33, 150, 8, 60, 180)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]

    def run(number: int) -> str:
        asked = {"model": NAME, "prompt": prompts[number], "temperature": 0, "max_tokens": 12}
        asked["extra_body"] = {"uniprefill": {"enabled": number % 4 != 3, "top_p": 0.6}}
        if number % 2:
            return api.completions.create(**asked).choices[0].text
        return "".join(chunk.choices[0].text for chunk in api.completions.create(stream=True, **asked))

    with ThreadPoolExecutor(len(lengths)) as pool:
        together = list(pool.map(run, range(len(lengths))))
    configs = [DENSE if number % 4 == 3 else DROPPING for number in range(len(lengths))]
    separate = [alone(ids, config, max_tokens=12) for ids, config in zip(prompts, configs, strict=True)]
    assert together == [completion.text for completion in separate]
    wait_until(lambda: nothing_held(server))
    assert metric(server, "vllm:request_success_total") - before[0] == len(lengths)
    tokens = sum(len(completion.token_ids) for completion in separate)
    assert metric(server, "vllm:generation_tokens_total") - before[1] == tokens


def test_short_prompts_drop_nothing_unless_they_ask_to(llm):
    ids = prompt(200)
    with tiny_server(dense_below=201) as server, client(server) as api:

        def kept(**dropping: object) -> float:
            answer = api.completions.create(
                model=NAME, prompt=ids, max_tokens=1, temperature=0, extra_body={"uniprefill": dropping}
            )
            return answer.choices[0].model_extra["uniprefill"]["kept_fraction"]

        assert kept() == kept(enabled=False) == kept(enabled=True, top_p=1.0) == 1.0
        assert kept(enabled=True, top_p=0.3) < kept(enabled=True) < 0.95
        assert metric(server, "uniprefill:dense_prefills_total") == 3
        assert metric(server, "uniprefill:kept_fraction_count") == 5


def test_models_health_and_metrics(server, api):
    assert [model.id for model in api.models.list()] == [NAME]
    assert api.models.retrieve(NAME).model_extra["max_model_len"] == 256
    assert ask(server, "/health", method="GET")[::2] == (200, {"status": "ok"})
    api.completions.create(model=NAME, prompt="ab", max_tokens=3)
    text = ask(server, "/metrics", method="GET")[2].decode()
    for name in (
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "uniprefill:kept_fraction_bucket",
    ):
        assert f"{name}{{" in text and f'model_name="{NAME}"' in text, name
