"""SmolLM2-135M behind the server, asked by OpenAI's client."""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

import uniprefill_jax as up
from tests.conftest import real_text
from tests.serve.model import client, nothing_held, wait_until
from uniprefill_jax.serve.server import running_server
from uniprefill_jax.serve.settings import ServerSettings

pytestmark = pytest.mark.slow

NAME = "smollm2-135m"
CONFIG = up.UniPrefillConfig(top_p=0.9)
ENGINE = up.EngineConfig(pool_pages=30 * 16384 // 64, max_running=8, prefill_chunk=512, max_length=4096)
MESSAGES = [{"role": "user", "content": "Name the capitals of France, Italy and Japan, each on a line of its own."}]


@pytest.fixture(scope="module")
def llm(real_llm):
    return real_llm(NAME)


@pytest.fixture(scope="module")
def server(llm):
    with running_server(up.Engine(llm, ENGINE), ServerSettings(NAME, port=0, uniprefill=CONFIG)) as running:
        yield running


@pytest.fixture(scope="module")
def api(server):
    with client(server) as own:
        yield own.with_options(timeout=1200)


@pytest.fixture(scope="module")
def wanted(llm):
    """The greedy answer, by the path that the server does not use."""
    ids = llm.tokenizer.apply_chat_template(MESSAGES)
    return llm.generate([ids], CONFIG, up.SamplingConfig(max_tokens=48))[0]


def test_chat_streamed_and_stopped(api, wanted):
    asked = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 48}
    answer = api.chat.completions.create(**asked).choices[0]
    assert answer.message.content == wanted.text and answer.finish_reason == wanted.finish_reason
    chunks = list(api.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert len(chunks) > len(wanted.token_ids) // 2
    # Five letters from the middle of the answer; the other one begins like a part of it and goes on otherwise.
    stop = wanted.text[len(wanted.text) // 2 :][:5]
    at = wanted.text.index(stop)
    stopped = ""
    for chunk in api.chat.completions.create(**asked, stream=True, stop=[stop, wanted.text[at // 2 :][:3] + "#"]):
        stopped += chunk.choices[0].delta.content or ""
        assert wanted.text[:at].startswith(stopped)
    assert stopped == wanted.text[:at] and chunk.choices[0].finish_reason == "stop"


def test_log_probabilities(api, wanted):
    asked = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    content = api.chat.completions.create(**asked, logprobs=True, top_logprobs=5).choices[0].logprobs.content
    logits = wanted.prefill.logits.astype(np.float64)
    truth = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert content[0].logprob == pytest.approx(truth.max(), abs=1e-3)
    assert [top.logprob for top in content[0].top_logprobs] == pytest.approx(-np.sort(-truth)[:5], abs=1e-3)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)
    assert wanted.text.startswith(b"".join(bytes(token.bytes) for token in content).decode())


@pytest.mark.timeout(1800)
def test_32_concurrent_requests_get_what_they_get_alone(server, api, llm):
    """20 to 3,000 tokens, dropping on; every text as when the server has nothing else to do."""
    random = np.random.default_rng(0)
    text = llm.tokenizer.encode(real_text())
    lengths = [20, 3000, *np.exp(random.uniform(np.log(20), np.log(3000), 30)).astype(int).tolist()]
    starts = [int(random.integers(0, max(1, len(text) - length))) for length in lengths]
    prompts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    assert [len(prompt) for prompt in prompts] == lengths

    def ask(ids: list[int]) -> tuple[bytes, float]:
        choice = api.completions.create(model=NAME, prompt=ids, temperature=0, max_tokens=16).choices[0]
        return choice.text.encode(), choice.model_extra["uniprefill"]["kept_fraction"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(ask, prompts))
    alone = [ask(ids) for ids in prompts]
    assert together == alone
    assert min(kept for _, kept in alone) < 0.9
    wait_until(lambda: nothing_held(server))


def test_the_command_serves_and_drains(llm):
    wanted = llm.generate(["One, two,"], None, up.SamplingConfig(max_tokens=60))[0]
    arguments = ["--port", "0", "--max-length", "256", "--cache-tokens", "1024", "--max-running", "2"]
    program = "from uniprefill_jax.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", NAME, *arguments, "--prefill-chunk", "128"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = (json.loads(line) for line in process.stderr if line.startswith("{"))
        url = next(line["url"] for line in lines if line["message"] == "listening")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as api:
            stream = iter(
                api.completions.create(model=NAME, prompt="One, two,", temperature=0, max_tokens=60, stream=True)
            )
            chunks = [next(stream)]
            process.send_signal(signal.SIGTERM)
            chunks += stream
        logged = list(lines)
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason == "length"
    # uvicorn hands the signal on when all is done.
    assert process.returncode == -signal.SIGTERM
    (request,) = [line for line in logged if line["message"] == "request"]
    assert (request["status"], request["completion_tokens"], request["finish_reasons"]) == (200, 60, ["length"])
