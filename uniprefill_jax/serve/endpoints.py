"""The two endpoints that generate: `/v1/completions` and `/v1/chat/completions`, whole or streamed."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from uniprefill_jax.serve.answers import Answer, usage
from uniprefill_jax.serve.engine_thread import EngineThread
from uniprefill_jax.serve.errors import ApiError, timed_out
from uniprefill_jax.serve.generation import Generation
from uniprefill_jax.serve.preparation import Prepared
from uniprefill_jax.serve.settings import ServerSettings
from uniprefill_jax.tokenizer import Tokenizer

CLIENT_GONE = 499  # what logs call a request whose client went away; nobody receives it

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect chunks
]


class GenerationEndpoint:
    """An ASGI application for one kind of request. A client that goes away cancels its request."""

    def __init__(
        self,
        prepare: Callable[[bytes], Prepared],
        answer: Callable[[str, str, int, bool], Answer],
        engine: EngineThread,
        settings: ServerSettings,
        tokenizer: Tokenizer | None,
        workers: Executor,
    ):
        self._prepare = prepare
        self._answer = answer
        self._engine = engine
        self._settings = settings
        self._tokenizer = tokenizer
        self._workers = workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; ApiError where nothing was sent yet."""
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        record = scope["state"]["log"]
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                await self._respond(Request(scope, receive), noting_send)
        except ClientDisconnect:
            record["status"] = CLIENT_GONE
        except (ApiError, TimeoutError) as failure:
            error = failure if isinstance(failure, ApiError) else timed_out(self._settings.request_timeout)
            if not started:
                raise error from None
            # The status is sent already: clients look for an error among the events.
            record["error"] = error.message
            await send({"type": "http.response.body", "body": _event(error.body), "more_body": False})

    async def _respond(self, request: Request, send: Send) -> None:
        body = await read_body(request, self._settings.max_body_bytes)
        prepared = await asyncio.get_running_loop().run_in_executor(self._workers, self._prepare, body)
        waiting, most = self._engine.waiting, self._settings.max_waiting
        if waiting + len(prepared.jobs) > most:
            raise ApiError(
                429,
                f"{waiting} sequences wait already, the server lets {most} wait; try again later",
                kind="rate_limit_error",
                code="server_overloaded",
                headers={"retry-after": "1"},
            )
        scope, model = request.scope, prepared.request.model
        answer = self._answer(scope["state"]["request_id"], model, len(prepared.jobs), prepared.request.includes_usage)
        record = scope["state"]["log"]
        record |= {"prompt_tokens": prepared.prompt_tokens, "stream": bool(prepared.request.stream)}
        async with Generation(self._engine, prepared.jobs, self._tokenizer) as generation:
            deliver = _stream if prepared.request.stream else _whole
            work = deliver(scope, send, answer, generation, prepared)
            try:
                await _until_disconnected(request.receive, work)
            finally:
                record["completion_tokens"] = sum(choice.tokens for choice in generation.choices)
                record["finish_reasons"] = [choice.finish_reason for choice in generation.choices]
                record["kept_fractions"] = [round(choice.kept_fraction, 4) for choice in generation.choices]


async def read_body(request: Request, limit: int) -> bytes:
    """The body; ApiError 413 as soon as it is known to be longer than `limit` bytes."""
    too_long = ApiError(
        413,
        f"the body is longer than {limit} bytes, the most that this server takes",
        code="request_too_large",
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_long
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise too_long
    return bytes(body)


async def _whole(scope: Scope, send: Send, answer: Answer, generation: Generation, prepared: Prepared) -> None:
    async for _ in generation.growths():
        _note_first_token(scope)
    counted = usage(prepared.prompt_tokens, generation.choices, prepared.request.n or 1)
    response = JSONResponse(answer.whole(generation.choices, counted))
    await response(scope, _no_receive, send)


async def _stream(scope: Scope, send: Send, answer: Answer, generation: Generation, prepared: Prepared) -> None:
    """Server-sent events. The status waits for the first token, so that a refusal can still have one of its own."""
    opened = False
    async for growth in generation.growths():
        _note_first_token(scope)
        if not opened:
            opened = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            for chunk in answer.opening():
                await _send_event(send, chunk)
        chunk = answer.chunk(growth)
        if chunk is not None:
            await _send_event(send, chunk)
    if prepared.request.includes_usage:
        await _send_event(
            send, answer.usage_chunk(usage(prepared.prompt_tokens, generation.choices, prepared.request.n or 1))
        )
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _note_first_token(scope: Scope) -> None:
    state = scope["state"]
    state["log"].setdefault("first_token_seconds", round(time.monotonic() - state["arrived"], 4))


async def _send_event(send: Send, content: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": _event(content), "more_body": True})


def _event(content: dict[str, Any]) -> bytes:
    # ASCII throughout: some clients take other line separators, which JSON may hold as they are, for ends of events.
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


async def _no_receive() -> Message:
    raise AssertionError("nothing is received while an answer is sent")


async def _until_disconnected(receive: Callable[[], Awaitable[Message]], work: Coroutine[Any, Any, None]) -> None:
    """Run `work` unless the client goes away first: then it is cancelled, and ClientDisconnect raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})
    await working


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
