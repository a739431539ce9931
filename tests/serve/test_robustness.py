"""What clients do wrong, and what may go wrong: every answer is an OpenAI-shaped error, and the server goes on."""

import json
import logging
import socket
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

import uniprefill_jax as up
from tests.serve.model import ENGINE, NAME, ask, byte_llm, client, metric, nothing_held, tiny_server, wait_until
from uniprefill_jax.engine.engine import Engine
from uniprefill_jax.serve.logs import JsonFormatter
from uniprefill_jax.serve.server import running_server
from uniprefill_jax.serve.settings import ServerSettings, read_api_keys

GOOD = {"model": NAME, "prompt": "ab", "max_tokens": 2, "temperature": 0}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
STREAM = GOOD | {"prompt": [7], "max_tokens": 200, "stream": True}


@pytest.fixture(scope="module")
def server():
    with tiny_server() as running:
        yield running


def assert_error(answer, status: int, text: str, param: str | None = None) -> None:
    """The answer is an error as OpenAI writes them."""
    assert answer[0] == status, answer
    error = answer[2]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"] and "\n" not in error["message"], error
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("body", "text", "param"),
    [
        (b"", "no JSON object", None),
        (b'{"model": "tiny', "no JSON object", None),
        (b"\xff\xfe", "no JSON object", None),
        (b"[" * 100_000, "recursion limit", None),
        (b"[]", "object", None),
        (b'{"model": "x", "prompt": "\\ud800"}', "no JSON object", None),
        ({"prompt": "ab"}, "you must provide model", "model"),
        ({"model": NAME}, "you must provide prompt", "prompt"),
        (GOOD | {"best": 1}, "Unrecognized request argument supplied: best", "best"),
        (GOOD | {"prompt": []}, "prompt", "prompt"),
        (GOOD | {"prompt": ""}, "no tokens", "prompt"),
        (GOOD | {"prompt": ["a", 1]}, "prompt", "prompt"),
        (GOOD | {"prompt": [1.5]}, "prompt", "prompt"),
        (GOOD | {"prompt": [[1], []]}, "prompt", "prompt"),
        (GOOD | {"prompt": {"a": 1}}, "prompt", "prompt"),
        (GOOD | {"prompt": [270]}, "token id 270, outside the vocabulary [0, 270)", "prompt"),
        (GOOD | {"prompt": [-1]}, "token id -1", "prompt"),
        (GOOD | {"prompt": [1] * 257}, "maximum context length is 256 tokens; prompt has 257 tokens", "prompt"),
        (GOOD | {"prompt": "ab " * 2_000_000}, "6000000 characters, at least 461539 tokens", "prompt"),
        (GOOD | {"max_tokens": 300}, "prompt has 1 tokens and 300 are to be generated", "prompt"),
        (GOOD | {"max_tokens": 0}, "max_tokens", "max_tokens"),
        (GOOD | {"max_tokens": "9"}, "max_tokens", "max_tokens"),
        (GOOD | {"n": 0}, "n:", "n"),
        (GOOD | {"n": 1e9}, "n:", "n"),
        (GOOD | {"prompt": ["a"] * 20, "n": 100}, "2000 sequences", "prompt"),
        (GOOD | {"temperature": -0.1}, "temperature", "temperature"),
        (GOOD | {"temperature": True}, "temperature", "temperature"),
        (GOOD | {"top_p": 0}, "top_p", "top_p"),
        (GOOD | {"logprobs": 21}, "logprobs", "logprobs"),
        (GOOD | {"stop": ["a", ""]}, "stop", "stop"),
        (GOOD | {"stop": ["a"] * 17}, "up to 16", "stop"),
        (GOOD | {"seed": 1.5}, "seed", "seed"),
        (GOOD | {"echo": True}, "does not support", "echo"),
        (GOOD | {"frequency_penalty": 0.5}, "does not support", "frequency_penalty"),
        (GOOD | {"stream_options": {"include_usage": True}}, "stream is true", None),
        (GOOD | {"uniprefill": {"top_p": 0}}, "uniprefill.top_p", "uniprefill.top_p"),
        (GOOD | {"uniprefill": {"block_size": 16}}, "Unrecognized", "uniprefill.block_size"),
        (GOOD | {"uniprefill": 1}, "uniprefill", "uniprefill"),
        (CHAT | {"messages": []}, "messages", "messages"),
        (CHAT | {"messages": "hello"}, "messages", "messages"),
        (CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "role", "messages.0.role"),
        (CHAT | {"messages": [{"role": "user", "content": None}]}, "content", "messages.0.content"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no other kind of content", None),
        (CHAT | {"messages": [{"role": "user", "content": "a" * 300}]}, "maximum context length is 256", "messages"),
        (CHAT | {"messages": [{"role": "user", "content": "ab" * 1_000_000}]}, "2000000 characters", "messages"),
        (CHAT | {"tools": [{"type": "function"}]}, "does not support", "tools"),
        (CHAT | {"response_format": {"type": "json_object"}}, "does not support", "response_format"),
        (CHAT | {"top_logprobs": 2}, "logprobs is true", None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_requests_are_named(server, body, text, param):
    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    assert_error(ask(server, path, body), 400, text, param)


def test_the_client_sees_its_own_exceptions(server):
    with client(server) as api:
        with pytest.raises(openai.NotFoundError, match=r"'gpt-4' does not exist; this server has 'tiny/bytes'"):
            api.completions.create(model="gpt-4", prompt="ab")
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve("gpt-4")
        with pytest.raises(openai.BadRequestError, match="context length") as caught:
            api.completions.create(model=NAME, prompt=[5] * 1000)
        assert caught.value.code == "context_length_exceeded"
        # Fields at the value that changes nothing are let through: clients send them.
        asked = {"frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "none"}
        answer = api.chat.completions.create(**CHAT, **asked, user="me", metadata={"a": "b"}, store=False)
        again = [*CHAT["messages"], answer.choices[0].message.model_dump(), *CHAT["messages"]]
        assert api.chat.completions.create(**CHAT | {"messages": again}).choices[0].message.content is not None


def test_unknown_urls_and_methods(server):
    assert_error(ask(server, "/v1/embeddings", GOOD), 404, "/v1/embeddings")
    assert_error(ask(server, "/v1/completions", method="GET"), 405, "Method Not Allowed")
    assert_error(ask(server, "/profile/start"), 404, "--profile-folder")
    assert_error(ask(server, "/profile/stop"), 409, "no trace")


def test_a_body_of_100_megabytes_is_refused(server):
    assert_error(ask(server, "/v1/completions", b" " * 100_000_000), 413, "longer than 8388608 bytes")
    # The same without its length announced.
    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname, address.port, timeout=60)
    pieces = (b" " * 1_000_000 for _ in range(20))
    connection.request("POST", "/v1/completions", pieces, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert ask(server, "/v1/completions", GOOD)[0] == 200


def test_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("first-key\n\n second-key \n")
    with tiny_server(api_keys=read_api_keys(path)) as server:
        for headers in ({}, {"authorization": "Bearer first"}, {"authorization": "Basic first-key"}):
            answer = ask(server, "/v1/completions", GOOD, headers)
            assert_error(answer, 401, "API key")
            assert answer[1]["www-authenticate"] == "Bearer"
        assert_error(ask(server, "/profile/start"), 401, "API key")
        assert ask(server, "/v1/completions", GOOD, {"authorization": "bearer second-key"})[0] == 200
        assert ask(server, "/health", method="GET")[0] == ask(server, "/metrics", method="GET")[0] == 200
        with client(server, "wrong") as api, pytest.raises(openai.AuthenticationError):
            api.models.list()
        with client(server, "first-key") as api:
            assert len(api.models.list().data) == 1
    path.write_text("\n")
    with pytest.raises(up.ConfigError, match="no API key"):
        read_api_keys(path)
    assert "first-key" not in repr(ServerSettings(NAME, api_keys=("first-key",)))


def test_a_client_that_goes_away_frees_its_pages_within_a_step(monkeypatch):
    steps_after = []
    with tiny_server() as server, client(server) as api:
        engine = server.engine._engine
        cancel, step = Engine.cancel, Engine.step
        asked_at, begun = threading.Event(), []

        def counted(self):
            begun.append(None)
            time.sleep(0.02)  # or it might have finished by itself
            return step(self)

        def noted_cancel(self, number):
            steps_after.append(len(begun))
            return cancel(self, number)

        put = server.engine.cancel

        def noted_put(job):
            steps_after.append(len(begun))
            asked_at.set()
            put(job)

        monkeypatch.setattr(Engine, "step", counted)
        monkeypatch.setattr(Engine, "cancel", noted_cancel)
        monkeypatch.setattr(server.engine, "cancel", noted_put)
        stream = api.completions.create(**STREAM)
        next(iter(stream))
        assert engine.stats().pages_in_use > 0
        stream.close()
        assert asked_at.wait(30)
        wait_until(lambda: nothing_held(server))
        # At most the step that was under way when the engine was told.
        assert len(steps_after) == 2 and steps_after[1] - steps_after[0] <= 1
        assert metric(server, "vllm:request_success_total", finished_reason="abort") == 1
        # One that does not stream, and goes away while it waits.
        address = urlsplit(server.url)
        connection = HTTPConnection(address.hostname, address.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(STREAM | {"stream": False, "n": 3}))
        wait_until(lambda: server.engine.stats.running > 0)
        connection.close()
        wait_until(lambda: metric(server, "vllm:request_success_total", finished_reason="abort") == 4)
        wait_until(lambda: nothing_held(server))
        wait_until(lambda: metric(server, "uniprefill:http_responses_total", status="499") >= 1)


def test_shutting_down_lets_running_requests_finish():
    with tiny_server() as server, client(server) as api:
        stream = iter(api.completions.create(**GOOD | {"prompt": [7], "max_tokens": 120, "stream": True}))
        first = next(stream)
        server.begin_shutdown()
        address = urlsplit(server.url)

        def refused() -> bool:
            try:
                socket.create_connection((address.hostname, address.port), timeout=1).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_until(refused)
        rest = list(stream)
        assert first.choices[0].finish_reason is None and rest[-1].choices[0].finish_reason in ("length", "stop")
        assert server.wait(30) and not server.engine.alive
        assert nothing_held(server)


def test_draining_has_an_end(caplog):
    caplog.set_level(logging.CRITICAL)
    with tiny_server(drain_timeout=1.0) as server, client(server) as api:
        slow_down(server, 0.2)
        stream = iter(api.completions.create(**STREAM))
        next(stream)
        start = time.monotonic()
        server.begin_shutdown()
        with pytest.raises(openai.APIConnectionError):
            list(stream)
        assert server.wait(30) and time.monotonic() - start < 20


def slow_down(server, seconds: float) -> None:
    """Let every step of a server's engine take at least so long."""
    engine = server.engine._engine
    step = engine.step

    def slow():
        time.sleep(seconds)
        return step()

    engine.step = slow


def test_a_dead_engine_is_told_to_everybody(caplog):
    caplog.set_level(logging.CRITICAL, "uniprefill_jax")
    with tiny_server() as server, client(server) as api:
        slow_down(server, 0.02)
        stream = iter(api.completions.create(**STREAM))
        next(stream)
        answers = []
        waiting = [
            threading.Thread(target=lambda: answers.append(ask(server, "/v1/completions", GOOD | {"max_tokens": 200})))
            for _ in range(6)
        ]
        for thread in waiting:
            thread.start()
        wait_until(lambda: server.engine.stats.running == ENGINE.max_running)

        def fail():
            raise RuntimeError("out of memory")

        server.engine._engine.step = fail
        for thread in waiting:
            thread.join(30)
        assert len(answers) == 6
        for answer in answers:
            assert_error(answer, 500, "the engine has failed")
        with pytest.raises(openai.APIError, match="the engine has failed"):
            list(stream)
        assert ask(server, "/health", method="GET")[0] == 503
        assert_error(ask(server, "/v1/completions", GOOD), 500, "the engine has failed")
        assert ask(server, "/metrics", method="GET")[0] == 200


def test_requests_that_take_too_long_are_ended():
    with tiny_server(request_timeout=1.0) as server, client(server) as api:
        slow_down(server, 0.05)
        asked = STREAM | {"stream": False}
        assert_error(ask(server, "/v1/completions", asked), 504, "longer than 1 s")
        wait_until(lambda: nothing_held(server))
        with pytest.raises(openai.APIError, match="longer than 1 s"):
            list(api.completions.create(**STREAM))
        wait_until(lambda: nothing_held(server))
        # A client that never sends the body that it announced.
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            assert b" 504 " in connection.recv(65536)


def test_too_many_waiting_requests_are_turned_away():
    with tiny_server(max_waiting=3) as server:
        slow_down(server, 0.1)
        running = threading.Thread(target=ask, args=(server, "/v1/completions", GOOD | {"max_tokens": 25, "n": 3}))
        running.start()
        wait_until(lambda: server.engine.stats.running == 3)
        more = threading.Thread(target=ask, args=(server, "/v1/completions", GOOD | {"n": 3, "max_tokens": 25}))
        more.start()
        wait_until(lambda: server.engine.stats.waiting == 2)
        answer = ask(server, "/v1/completions", GOOD | {"n": 2})
        assert_error(answer, 429, "2 sequences wait already, the server lets 3 wait")
        assert answer[1]["retry-after"] == "1"
        running.join()
        more.join()


def test_request_ids_and_logs(server, caplog):
    caplog.set_level(logging.INFO, "uniprefill_jax.serve")
    own = ask(server, "/v1/completions", GOOD, {"x-request-id": "my.id-7"})[1]["x-request-id"]
    made = ask(server, "/v1/completions", b"{", {"x-request-id": "not a plain id"})[1]["x-request-id"]
    assert own == "my.id-7" and len(made) == 32
    wait_until(lambda: len(caplog.records) >= 2)
    first, second = (json.loads(JsonFormatter().format(record)) for record in caplog.records[-2:])
    assert (first["request_id"], first["path"], first["status"]) == ("my.id-7", "/v1/completions", 200)
    assert (first["prompt_tokens"], first["completion_tokens"], first["finish_reasons"]) == (1, 2, ["length"])
    assert first["seconds"] >= first["first_token_seconds"] > 0
    assert second["status"] == 400 and "no JSON object" in second["error"]


def test_profiles_are_written(tmp_path):
    with tiny_server(profile_folder=tmp_path) as server:
        status, _, started = ask(server, "/profile/start")
        assert status == 200
        assert_error(ask(server, "/profile/start"), 409, "stop it first")
        ask(server, "/v1/completions", GOOD)
        assert ask(server, "/profile/stop")[2] == started
        assert list(Path(started["folder"]).rglob("*.xplane.pb"))


def test_settings_are_checked():
    with pytest.raises(up.ConfigError, match="port is -1"):
        ServerSettings(NAME, port=-1)
    with pytest.raises(up.ConfigError, match="request_timeout"):
        ServerSettings(NAME, request_timeout=float("nan"))
    with pytest.raises(up.ConfigError, match="API key"):
        ServerSettings(NAME, api_keys=("",))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings(NAME, port=taken.getsockname()[1])
        with pytest.raises(up.InputError, match="cannot listen"), running_server(Engine(byte_llm(), ENGINE), settings):
            pass
