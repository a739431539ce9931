"""The ASGI application: routes, and what becomes of errors."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from uniprefill_jax.engine.engine import Engine
from uniprefill_jax.serve.answers import ChatAnswer, CompletionAnswer
from uniprefill_jax.serve.endpoints import GenerationEndpoint
from uniprefill_jax.serve.engine_thread import EngineThread
from uniprefill_jax.serve.errors import ApiError
from uniprefill_jax.serve.metrics import CONTENT_TYPE, Metrics
from uniprefill_jax.serve.middleware import KeyCheck, RequestLog
from uniprefill_jax.serve.preparation import Preparation, unknown_model
from uniprefill_jax.serve.profiling import Profiler
from uniprefill_jax.serve.settings import ServerSettings

_GUARDED = ("/v1", "/profile")


class _Pages:
    """The endpoints that answer at once."""

    def __init__(self, engine: EngineThread, longest: int, metrics: Metrics, settings: ServerSettings):
        self._engine = engine
        self._metrics = metrics
        self._name = settings.model_name
        self._profiler = Profiler(settings.profile_folder)
        self._model = {
            "id": settings.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "uniprefill-jax",
            "max_model_len": longest,
        }

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """The same by name; names may hold slashes."""
        name = request.path_params["name"]
        if name != self._name:
            raise unknown_model(name, self._name)
        return JSONResponse(self._model)

    async def health(self, request: Request) -> Response:
        """200 while the engine takes requests, 503 once it has failed."""
        if self._engine.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the engine has failed"}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, request: Request) -> Response:
        """Everything that is counted."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    async def profile_start(self, request: Request) -> Response:
        """Begin a trace."""
        return JSONResponse({"folder": str(await asyncio.to_thread(self._profiler.start))})

    async def profile_stop(self, request: Request) -> Response:
        """End it."""
        return JSONResponse({"folder": str(await asyncio.to_thread(self._profiler.stop))})

    def close(self) -> None:
        """End a trace that was left running."""
        self._profiler.close()


def build_app(engine: Engine, settings: ServerSettings) -> Starlette:
    """The application over an engine, which nobody else may use from now on: it runs from start-up to shutdown."""
    metrics = Metrics(settings.model_name)
    thread = EngineThread(engine, metrics)
    metrics.watch(thread)
    # One worker: a tokenizer need not bear two callers, and two would not be faster on the way into one engine.
    workers = ThreadPoolExecutor(1, "prepare")
    preparation = Preparation(engine, settings)
    pages = _Pages(thread, engine.most_tokens(1), metrics, settings)

    def generating(prepare: Any, answer: Any) -> GenerationEndpoint:
        return GenerationEndpoint(prepare, answer, thread, settings, engine.llm.tokenizer, workers)

    routes = [
        Route("/v1/completions", generating(preparation.completion, CompletionAnswer), methods=["POST"]),
        Route("/v1/chat/completions", generating(preparation.chat, ChatAnswer), methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/health", pages.health),
        Route("/metrics", pages.metrics),
        Route("/profile/start", pages.profile_start, methods=["POST"]),
        Route("/profile/stop", pages.profile_stop, methods=["POST"]),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        thread.start()
        try:
            yield
        finally:
            await asyncio.to_thread(thread.stop)
            await asyncio.to_thread(pages.close)
            workers.shutdown()

    counted = frozenset(route.path for route in routes if "{" not in route.path)
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(RequestLog, metrics=metrics, paths=counted),
            Middleware(KeyCheck, keys=settings.api_keys, prefixes=_GUARDED),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unforeseen},
    )
    app.state.engine_thread = thread
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["state"]["log"]["error"] = error.message
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(
        error.status_code,
        f"{request.method} {request.url.path}: {error.detail}",
        code="unknown_url" if error.status_code == HTTPStatus.NOT_FOUND else None,
        headers=dict(error.headers or {}),
    ).response()


async def _unforeseen(request: Request, error: Exception) -> Response:
    # Raised through all middleware: nobody else puts the id on this answer.
    headers = {"x-request-id": request.scope["state"]["request_id"]}
    return ApiError(500, "the server made a mistake; see its log", kind="server_error", headers=headers).response()
