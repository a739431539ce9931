"""What answers look like: OpenAI's objects for completions and chats, whole and in chunks."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from uniprefill_jax.serve.generation import Choice, Growth, TokenReport

Json = dict[str, Any]


class Answer(Protocol):
    """How one request is answered."""

    def opening(self) -> list[Json]:
        """Chunks before the first text."""
        ...

    def chunk(self, growth: Growth) -> Json | None:
        """The chunk that tells of a growth; None where there is nothing to tell."""
        ...

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk after the last text."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """Everything at once."""
        ...


def usage(prompt_tokens: int, choices: Sequence[Choice], choices_per_prompt: int) -> Json:
    """Numbers of tokens; a prompt counts once however many choices it has."""
    completion_tokens = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.reused_tokens for choice in choices[::choices_per_prompt])
        },
    }


class _Chunks:
    """What both kinds of chunks have in common."""

    def __init__(self, kind: str, identity: str, model: str, choices: int, includes_usage: bool):
        self._head = {"id": identity, "object": kind, "created": int(time.time()), "model": model}
        self._number = choices
        self._includes_usage = includes_usage

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        chunk = self._head | {"choices": choices}
        return chunk | {"usage": usage} if self._includes_usage else chunk

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk after the last text."""
        return self._chunk([], usage)


class CompletionAnswer(_Chunks):
    """Answers `/v1/completions`."""

    def __init__(self, identity: str, model: str, choices: int, includes_usage: bool):
        super().__init__("text_completion", f"cmpl-{identity}", model, choices, includes_usage)
        self._offsets = [0] * choices

    def opening(self) -> list[Json]:
        """Nothing."""
        return []

    def chunk(self, growth: Growth) -> Json | None:
        """A piece of text."""
        choice = growth.choice
        if not growth.text and not growth.reports and choice.finish_reason is None:
            return None
        return self._chunk([self._choice(choice, growth.text, growth.reports)])

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """All texts."""
        return self._head | {
            "choices": [self._choice(choice, choice.text, choice.reports) for choice in choices],
            "usage": usage,
        }

    def _choice(self, choice: Choice, text: str, reports: list[TokenReport]) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice.index, reports) if reports else None,
            "finish_reason": choice.finish_reason,
        } | _extension(choice)

    def _logprobs(self, index: int, reports: list[TokenReport]) -> Json:
        offsets = []
        for report in reports:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(_text(report.content))
        return {
            "tokens": [_label(report.content) for report in reports],
            "token_logprobs": [report.logprob for report in reports],
            "top_logprobs": [
                {_label(content): value for content, value in reversed(report.alternatives)} for report in reports
            ],
            "text_offset": offsets,
        }


class ChatAnswer(_Chunks):
    """Answers `/v1/chat/completions`."""

    def __init__(self, identity: str, model: str, choices: int, includes_usage: bool):
        super().__init__("chat.completion.chunk", f"chatcmpl-{identity}", model, choices, includes_usage)

    def opening(self) -> list[Json]:
        """Who speaks."""
        return [
            self._chunk([self._delta(index, {"role": "assistant", "content": ""})]) for index in range(self._number)
        ]

    def chunk(self, growth: Growth) -> Json | None:
        """A piece of the message."""
        choice = growth.choice
        if not growth.text and not growth.reports and choice.finish_reason is None:
            return None
        delta = {"content": growth.text} if growth.text or growth.reports else {}
        return self._chunk(
            [self._delta(choice.index, delta, growth.reports, choice.finish_reason) | _extension(choice)]
        )

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """All messages."""
        return self._head | {
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": _chat_logprobs(choice.reports),
                    "finish_reason": choice.finish_reason,
                }
                | _extension(choice)
                for choice in choices
            ],
            "usage": usage,
        }

    def _delta(
        self, index: int, delta: Json, reports: Sequence[TokenReport] = (), finish_reason: str | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": _chat_logprobs(reports), "finish_reason": finish_reason}


def _chat_logprobs(reports: Sequence[TokenReport]) -> Json | None:
    if not reports:
        return None
    return {
        "content": [
            _chat_token(report.content, report.logprob)
            | {"top_logprobs": [_chat_token(content, value) for content, value in report.alternatives]}
            for report in reports
        ],
        "refusal": None,
    }


def _chat_token(content: bytes, logprob: float) -> Json:
    return {"token": _text(content), "logprob": logprob, "bytes": list(content)}


def _extension(choice: Choice) -> Json:
    """What OpenAI's objects do not have: how much of the prompt the caches kept."""
    return {} if choice.finish_reason is None else {"uniprefill": {"kept_fraction": choice.kept_fraction}}


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _label(content: bytes) -> str:
    """A token's name where names must differ: bytes that are no text are spelled out, as OpenAI does."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
