"""What surrounds every request: an id, one line in the log, a count, and the key that it must show."""

import hmac
import logging
import re
import time
import uuid
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from uniprefill_jax.serve.errors import ApiError
from uniprefill_jax.serve.metrics import Metrics

_logger = logging.getLogger("uniprefill_jax.serve")
_POLLED = ("/health", "/metrics")  # asked every few seconds: logged for debugging only, unless something is wrong
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestLog:
    """Gives each request an id (the client's own `X-Request-Id`, if it is a plain one), logs and counts its answer.

    Further in, `scope["state"]` holds `request_id`, `arrived` (monotonic seconds) and `log`, a dict of fields to log.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]):
        """`paths` are the ones that are counted by name; what clients make up is counted together."""
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = Headers(scope=scope).get("x-request-id", "")
        request_id = own if _REQUEST_ID.fullmatch(own) else uuid.uuid4().hex
        arrived = time.monotonic()
        record: dict[str, object] = {
            "request_id": request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": 500,
        }
        scope.setdefault("state", {}).update(request_id=request_id, arrived=arrived, log=record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.answered(path, int(str(record["status"])))
            record["seconds"] = round(time.monotonic() - arrived, 4)
            is_dull = path in _POLLED and record["status"] == HTTPStatus.OK
            _logger.log(logging.DEBUG if is_dull else logging.INFO, "request", extra={"fields": record})


class KeyCheck:
    """Lets requests to some paths through only with one of the keys, as `Authorization: Bearer ...`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], prefixes: tuple[str, ...]):
        """Without keys everything passes."""
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._prefixes = prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        guarded = scope["type"] == "http" and self._keys and scope["path"].startswith(self._prefixes)
        if not guarded or self._knows(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "this server needs an API key: send `Authorization: Bearer KEY` with a key that it knows",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, shown = authorization.partition(" ")
        # Every key is compared, each in constant time: how long it takes tells nothing about any of them.
        matches = [hmac.compare_digest(shown.strip().encode(), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)
