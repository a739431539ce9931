"""From the body of a request to the jobs that answer it: parsed, tokenised, checked against the model's limits.

Long texts take a while to tokenise, so all of this runs on a worker thread; nothing here changes anything.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from uniprefill_jax.config import SamplingConfig, UniPrefillConfig
from uniprefill_jax.engine.engine import Engine
from uniprefill_jax.errors import UniPrefillError
from uniprefill_jax.serve.engine_thread import JobSpec
from uniprefill_jax.serve.errors import ApiError
from uniprefill_jax.serve.protocol import ChatRequest, CompletionRequest, DroppingOptions, parse
from uniprefill_jax.serve.settings import ServerSettings


@dataclass(frozen=True)
class Prepared:
    """A request ready for the engine.

    Attributes:
        request: as parsed.
        jobs: every choice of the first prompt, then of the second, and so on.
        prompt_tokens: tokens of all prompts together, each counted once.
    """

    request: CompletionRequest | ChatRequest
    jobs: tuple[JobSpec, ...]
    prompt_tokens: int


class Preparation:
    """Prepares requests to one engine; reads nothing of it that a step changes."""

    def __init__(self, engine: Engine, settings: ServerSettings):
        self._engine = engine
        self._llm = engine.llm
        self._settings = settings
        tokenizer = engine.llm.tokenizer
        self._longest_token = 1 if tokenizer is None else tokenizer.longest_token

    def completion(self, body: bytes) -> Prepared:
        """A request to `/v1/completions`; ApiError where it cannot be answered."""
        request = parse(CompletionRequest, body)
        self._check_model(request.model)
        prompts = [
            self._encode(prompt) if isinstance(prompt, str) else self._checked(prompt) for prompt in request.prompt
        ]
        return self._prepared(request, prompts, "prompt")

    def chat(self, body: bytes) -> Prepared:
        """A request to `/v1/chat/completions`; ApiError where it cannot be answered."""
        request = parse(ChatRequest, body)
        self._check_model(request.model)
        if self._llm.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer, so it cannot chat; use /v1/completions with token ids")
        self._check_characters(sum(len(message.content) for message in request.messages), "messages")
        try:
            tokens = self._llm.tokenizer.apply_chat_template([message.for_template() for message in request.messages])
        except UniPrefillError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from None
        return self._prepared(request, [tokens], "messages")

    def _check_model(self, name: str) -> None:
        if name != self._settings.model_name:
            raise unknown_model(name, self._settings.model_name)

    def _encode(self, text: str) -> list[int]:
        if self._llm.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; use token ids", param="prompt", code="invalid_value")
        self._check_characters(len(text), "prompt")
        return self._llm.tokenizer.encode(text)

    def _check_characters(self, count: int, param: str) -> None:
        """Refuse a text that is too long however it is tokenised: tokenising megabytes would keep others waiting."""
        longest, least = self._engine.most_tokens(1), -(-count // self._longest_token)
        if least > longest:
            raise _too_long(longest, f"{param} has {count} characters, at least {least} tokens", param)

    def _checked(self, tokens: list[int]) -> list[int]:
        vocabulary = self._llm.config.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            message = f"prompt holds token id {wrong}, outside the vocabulary [0, {vocabulary})"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return tokens

    def _prepared(self, request: CompletionRequest | ChatRequest, prompts: Sequence[list[int]], param: str) -> Prepared:
        choices = request.n or 1
        if len(prompts) * choices > self._settings.max_waiting:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n = {choices} are {len(prompts) * choices} sequences, the server takes "
                f"at most {self._settings.max_waiting} at a time",
                param=param,
                code="invalid_value",
            )
        sampling = self._sampling(request)
        jobs = []
        for tokens in prompts:
            limited = replace(sampling, max_tokens=self._token_limit(request, len(tokens), param))
            config = self._dropping(request.uniprefill, len(tokens))
            for choice in range(choices):
                seeded = replace(limited, seed=(limited.seed + choice) % 2**32)
                priority, logprobs = request.priority or 0, request.alternatives
                jobs.append(JobSpec(tuple(tokens), config, seeded, priority, logprobs))
        return Prepared(request, tuple(jobs), sum(map(len, prompts)))

    def _sampling(self, request: CompletionRequest | ChatRequest) -> SamplingConfig:
        if request.stop and self._llm.tokenizer is None:
            raise ApiError(400, "stop strings need a tokenizer, and this model has none", param="stop")
        return SamplingConfig(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=request.top_k or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=secrets.randbelow(2**32) if request.seed is None else request.seed % 2**32,
            stop=tuple(request.stop),
            ignore_eos=bool(request.ignore_eos),
        )

    def _token_limit(self, request: CompletionRequest | ChatRequest, length: int, param: str) -> int:
        """Most tokens for a prompt of this length: what was asked for, or all there is room for."""
        room, longest = self._engine.most_tokens(length), self._engine.most_tokens(1)
        wanted = request.token_limit
        if length == 0:
            raise ApiError(400, f"{param} has no tokens; a prompt needs at least one", param=param)
        if room < 1 or (wanted is not None and wanted > room):
            generated = "" if wanted is None else f" and {wanted} are to be generated"
            raise _too_long(longest, f"{param} has {length} tokens{generated}", param)
        return room if wanted is None else wanted

    def _dropping(self, asked: DroppingOptions, length: int) -> UniPrefillConfig:
        """How a prompt of this length is shortened: as the request says, else as the server does where it pays."""
        config = self._settings.uniprefill
        if asked.enabled is False or (asked.enabled is None and length < self._settings.dense_below):
            return UniPrefillConfig.dense()
        if config.is_dense and asked.enabled:
            config = replace(config, drop_layers="auto", top_p=UniPrefillConfig().top_p)
        return config if asked.top_p is None or config.drop_layers == () else replace(config, top_p=asked.top_p)


def _too_long(longest: int, found: str, param: str) -> ApiError:
    message = f"This model's maximum context length is {longest} tokens; {found}. Shorten it or ask for fewer."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unknown_model(name: str, served: str) -> ApiError:
    """The answer to a request for a model that is not served."""
    message = f"The model {name!r} does not exist; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")
