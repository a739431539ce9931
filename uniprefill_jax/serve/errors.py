"""What a client is told when something is wrong: OpenAI-shaped bodies, one class for all of them."""

from typing import Any

from starlette.responses import JSONResponse


class ApiError(Exception):
    """An answer that is no success.

    Attributes:
        status: HTTP status.
        message: one line that names the offending value and the fix.
        kind: OpenAI's `type` of the error.
        param: field of the request that is at fault.
        code: OpenAI's `code`, for programs.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients expect."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def engine_failed() -> ApiError:
    """The engine has died: nothing will be answered until the server is started anew."""
    return ApiError(500, "the engine has failed; see the server's log", kind="server_error", code="engine_failed")


def timed_out(seconds: float) -> ApiError:
    """A request took longer than the server allows."""
    return ApiError(
        504,
        f"the request took longer than {seconds:g} s; ask for fewer tokens or raise the server's request timeout",
        kind="timeout_error",
        code="request_timeout",
    )
