"""The requests of the OpenAI API: which fields there are, which are refused, and what a wrong one is answered with.

Types are strict: "16" is no number. Fields that OpenAI's API has and this server has not are accepted at the value that
changes nothing (clients send them so) and refused by name otherwise; fields that nobody knows are refused as well.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from uniprefill_jax.sampling import MAX_LOGPROBS
from uniprefill_jax.serve.errors import ApiError

MAX_CHOICES = 128
MAX_STOPS = 16

Prompts = list[str] | list[list[int]]


def _only(*neutral: Any) -> BeforeValidator:
    """Of a field that may be null or hold one of these values, which change nothing."""

    def check(value: Any) -> None:
        if value is not None and value not in neutral:
            raise PydanticCustomError("unsupported", "this server does not support it; leave it out")

    return BeforeValidator(check)


def _prompts(value: Any) -> Prompts:
    """One or more prompts, as texts or token ids; checked here because a union's errors would be one per branch."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {str}:
            return value
        if kinds == {int}:
            return [value]
        if kinds == {list} and all(prompt and set(map(type, prompt)) == {int} for prompt in value):
            return value
    raise PydanticCustomError(
        "prompt", "use a text, a list of texts, a list of token ids, or a list of such lists, none of them empty"
    )


def _stops(value: Any) -> list[str]:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise PydanticCustomError(
            "stop", "use a text or a list of up to {most} texts, none of them empty", {"most": MAX_STOPS}
        )
    return stops


def _content(value: Any) -> str:
    """A message's text, which may come in parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if isinstance(parts, list) and parts:
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        known = [text for text in texts if isinstance(text, str)]
        if len(known) == len(parts):
            return "".join(known)
    raise PydanticCustomError(
        "content", 'use a text or a list of parts {{"type": "text", "text": "..."}}; there is no other kind of content'
    )


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """`stream_options`. Obfuscation pads chunks against listeners; nothing is padded here."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, _only(False)] = None


class DroppingOptions(_Strict):
    """`uniprefill`: what a request may say about how its prompt is shortened. Neither field compiles anything.

    Attributes:
        top_p: share of the attention mass that stays.
        enabled: False drops nothing; True drops even where the prompt is so short that it hardly pays.
    """

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    enabled: bool | None = None


class _Generation(_Strict):
    """Fields that both endpoints share. `top_k`, `ignore_eos`, `priority` and `uniprefill` are beyond OpenAI's API."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    uniprefill: DroppingOptions = DroppingOptions()

    # Who asks, and how OpenAI keeps accounts of it: nothing depends on these.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    frequency_penalty: Annotated[None, _only(0)] = None
    presence_penalty: Annotated[None, _only(0)] = None
    logit_bias: Annotated[None, _only({})] = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "_Generation":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(_Generation):
    """`/v1/completions`."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    best_of: Annotated[None, _only(1)] = None
    echo: Annotated[None, _only(False)] = None
    suffix: Annotated[None, _only("")] = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens of each choice; OpenAI's default here is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Likeliest tokens to report beside each token; None reports nothing."""
        return self.logprobs


class ChatMessage(_Strict):
    """One message of a conversation. Fields that a client copies from an answer are accepted while they are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None

    refusal: Annotated[None, _only()] = None
    audio: Annotated[None, _only()] = None
    annotations: Annotated[None, _only([])] = None
    tool_calls: Annotated[None, _only([])] = None
    function_call: Annotated[None, _only()] = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: they know no newer role than "system"."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(_Generation):
    """`/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: Annotated[None, _only([])] = None
    tool_choice: Annotated[None, _only("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[None, _only([])] = None
    function_call: Annotated[None, _only("none", "auto")] = None
    response_format: Annotated[None, _only({"type": "text"})] = None
    modalities: Annotated[None, _only(["text"])] = None
    audio: Annotated[None, _only()] = None
    prediction: Annotated[None, _only()] = None
    reasoning_effort: Annotated[None, _only()] = None
    verbosity: Annotated[None, _only()] = None
    web_search_options: Annotated[None, _only()] = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens of each choice; None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """Likeliest tokens to report beside each token; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


def parse[Parsed: BaseModel](kind: type[Parsed], body: bytes) -> Parsed:
    """A request from its body; ApiError 400 that names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    what = first["msg"]
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is no JSON object: {what.removeprefix('Invalid JSON: ')}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        raise ApiError(400, f"Unrecognized request argument supplied: {where}", param=where, code="unknown_parameter")
    if first["type"] == "missing":
        raise ApiError(400, f"you must provide {where}", param=where, code="missing_required_parameter")
    message = f"{where}: {what}" if where else what
    raise ApiError(400, message, param=where or None, code="invalid_value")
