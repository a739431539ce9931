"""A tiny random model with a byte-level tokenizer, which seldom generates whole characters, and a server over it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
from transformers import PreTrainedTokenizerFast

import uniprefill_jax as up
from checkpoints_convert.gguf_tokenizer import build_tokenizer
from tests.checkpoints.vocabularies import TEMPLATE, byte_level_metadata
from tests.engine.tiny import DROPPING, MODELS, SIZES, poisoned_engine, run
from uniprefill_jax.engine.requests import Event
from uniprefill_jax.serve.server import RunningServer, running_server
from uniprefill_jax.serve.settings import ServerSettings
from uniprefill_jax.tokenizer import Tokenizer

NAME = "tiny/bytes"
ENGINE = up.EngineConfig(page_size=16, pool_pages=400, max_running=4, prefill_chunk=64, max_length=256)
SETTINGS = ServerSettings(NAME, port=0, uniprefill=DROPPING)


@cache
def byte_llm() -> up.LLM:
    """The model; ids beyond the tokenizer's 264 are in its vocabulary, as in many published models."""
    llm = up.LLM.from_config(SIZES | MODELS["llama"] | {"vocab_size": 270}, dtype="float32", seed=5)
    metadata = byte_level_metadata()
    backend = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(Path("bytes"), "llama", metadata),
        chat_template=TEMPLATE,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    llm.tokenizer = Tokenizer(backend, (metadata["tokenizer.ggml.eos_token_id"],))
    return llm


@dataclass
class Alone:
    """What an engine makes of one request that has it to itself (tests/engine holds engines against `generate`)."""

    token_ids: list[int]
    text: str
    events: list[Event]

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        return self.events[-1].finish_reason


def alone(
    ids: list[int], config: up.UniPrefillConfig = DROPPING, logprobs: int | None = None, **sampling: Any
) -> Alone:
    """Generate from one prompt without a server."""
    engine = poisoned_engine(byte_llm(), ENGINE)
    engine.submit(ids, config, up.SamplingConfig(**sampling), logprobs=logprobs)
    events: list[Event] = []
    (tokens,) = run(engine, events).values()
    return Alone(tokens, "".join(event.text for event in events), events)


@contextmanager
def tiny_server(engine: up.EngineConfig = ENGINE, **changes: Any) -> Iterator[RunningServer]:
    """A server over the tiny model; freed pages hold NaN."""
    with running_server(poisoned_engine(byte_llm(), engine), replace(SETTINGS, **changes)) as server:
        yield server


def client(server: RunningServer, key: str = "none") -> openai.OpenAI:
    """OpenAI's own client, which must not hide an error by trying again."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


def ask(
    server: RunningServer, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST"
) -> tuple[int, dict[str, str], Any]:
    """One request by hand: status, headers in lower case, and the body, parsed if it is JSON."""
    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname, address.port, timeout=60)
    sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, sent, {"content-type": "application/json"} | (headers or {}))
    response = connection.getresponse()
    content = response.read()
    connection.close()
    found = {name.lower(): value for name, value in response.getheaders()}
    return response.status, found, json.loads(content) if found["content-type"] == "application/json" else content


def metric(server: RunningServer, name: str, **labels: str) -> float:
    """The value of one series in /metrics, summed over the labels that are not named."""
    total = 0.0
    for line in ask(server, "/metrics", method="GET")[2].decode().splitlines():
        series, _, value = line.rpartition(" ")
        own, _, rest = series.partition("{")
        if own == name and all(f'{label}="{wanted}"' in rest for label, wanted in labels.items()):
            total += float(value)
    return total


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return as soon as the condition holds; fail where it does not become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.005)


def nothing_held(server: RunningServer) -> bool:
    """Whether no request holds a page, a promise or a slot."""
    stats = server.engine.stats
    return (stats.pages_in_use, stats.pages_reserved, stats.slots_in_use, server.engine.waiting) == (0, 0, 0, 0)
