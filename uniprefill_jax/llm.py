"""The Python API: load a model, prefill ragged batches of prompts, generate."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int32

from uniprefill_jax.calibrated import CalibratedSetting, calibrated_setting
from uniprefill_jax.config import BatchShape, SamplingConfig, UniPrefillConfig
from uniprefill_jax.decode import Continuation, DecodePlan
from uniprefill_jax.errors import ConfigError, InputError
from uniprefill_jax.models.causal_lm import CausalLM, ignored_tensors
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import ChooseSharding, initialise, parameter_specs, with_parameters
from uniprefill_jax.parallel.mesh import check_mesh, on_replica, replicas_of
from uniprefill_jax.parallel.replicas import deal, on_each
from uniprefill_jax.parallel.rules import ShardingRules
from uniprefill_jax.prefill import PrefillOutput
from uniprefill_jax.prefill_plan import PrefillPlan
from uniprefill_jax.programs import Programs, use_persistent_cache
from uniprefill_jax.results import Completion, PrefillResult
from uniprefill_jax.sampling import SamplingKind, SamplingNumbers
from uniprefill_jax.sparsify.buckets import prompt_bucket
from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers
from uniprefill_jax.sparsify.methods.protocol import Method

if TYPE_CHECKING:
    from uniprefill_jax.tokenizer import Tokenizer

# Tokens between two looks of the host at texts that a stop string may end.
STEPS_BETWEEN_STOPS = 16
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
Prompt = str | Sequence[int]
Setting = UniPrefillConfig | Method
Parameters = Callable[[CausalLM, ChooseSharding | None], dict[str, jax.Array]]


@dataclass(frozen=True)
class _PrefilledBatch:
    """A batch on the device after its prefill, and what the host made of it."""

    programs: Programs
    plan: PrefillPlan
    output: PrefillOutput
    results: list[PrefillResult]
    longest: int  # rows of a prompt to compile decode programs for, at least
    new_tokens: int  # likewise


class _DecodedPiece(NamedTuple):
    """The next tokens of every request, their log-probabilities where any were given (else zeros), time to compile."""

    tokens: Int32[np.ndarray, "steps B"]
    logprobs: Float[np.ndarray, "steps B"]
    compile_seconds: float


class LLM:
    """A model ready to run on the default device, or on the devices of a mesh.

    Attributes:
        config: the model's shape.
        dtype: type of weights and activations.
        tokenizer: text to tokens and back; None where the checkpoint has none.
        mesh: see `make_mesh`; None for one device.
        replicas: the compiled programs of every data replica of the mesh; without one there is a single entry.
        calibrated: the setting found for this model by `uniprefill calibrate`, if there is one.
        default_config: the setting of calls that name none: the calibrated one, or `UniPrefillConfig()`.
    """

    def __init__(
        self,
        config: dict[str, Any],
        parameters: Parameters,
        dtype: str,
        tokenizer: "Tokenizer | None" = None,
        mesh: Mesh | None = None,
        calibrated: CalibratedSetting | None = None,
    ):
        """Use `LLM.load` or `LLM.from_config`."""
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
        use_persistent_cache()
        self.config = read_model_config(config)
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.calibrated = calibrated
        self.default_config = UniPrefillConfig() if calibrated is None else calibrated.config
        resolve_drop_layers(self.default_config, self.config)  # a calibrated one may be of another model
        model = CausalLM(self.config, DTYPES[dtype])
        if mesh is None:
            state = with_parameters(model, parameters(model, None))
            self.replicas = [Programs(model, state, DTYPES[dtype])]
        else:
            check_mesh(mesh)
            rules = ShardingRules.of(parameter_specs(model), mesh)
            self.replicas = _replicas(model, parameters(model, rules.parameter), rules, DTYPES[dtype])

    @property
    def programs(self) -> Programs:
        """The compiled programs (of the first replica), for measurements that need to time one apart from the rest."""
        return self.replicas[0]

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: str = "bfloat16",
        progress: Callable[[int, int], None] | None = None,
        mesh: Mesh | None = None,
    ) -> "LLM":
        """Load a Hugging Face folder, a .gguf file, a converted (Orbax) folder, or a packaged model by its alias.

        `progress` is called with bytes done and in all. With a mesh (`make_mesh`) the model is cut over its devices
        and each process reads what its own devices hold. A setting that `uniprefill calibrate` wrote beside the model
        becomes the default of its calls. Raises CheckpointError or ConfigError, one line each.
        """
        # Random weights (`from_config`) need none of the readers, nor the libraries behind them.
        from checkpoints_convert import load_parameters, open_checkpoint
        from uniprefill_jax.tokenizer import load_tokenizer

        source = open_checkpoint(path)
        config = read_model_config(source.config)

        def parameters(model: CausalLM, sharding: ChooseSharding | None) -> dict[str, jax.Array]:
            return load_parameters(
                source,
                parameter_specs(model),
                dtype=DTYPES[dtype],
                ignore=ignored_tensors(config),
                sharding=sharding,
                progress=progress,
            )

        return cls(source.config, parameters, dtype, load_tokenizer(source), mesh, calibrated_setting(path))

    @classmethod
    def from_config(
        cls, config: dict[str, Any], dtype: str = "bfloat16", seed: int = 0, mesh: Mesh | None = None
    ) -> "LLM":
        """A model of the given config.json contents with random weights, for benchmarks and tests.

        The weights are the same on every mesh.
        """
        return cls(config, lambda model, sharding: initialise(model, seed, sharding), dtype, mesh=mesh)

    def prefill(
        self, prompts: Sequence[Prompt], config: Setting | None = None, *, shape: BatchShape | None = None
    ) -> list[PrefillResult]:
        """Prefill a ragged batch of prompts (token ids, or text where there is a tokenizer); one result each.

        `config` may be one of the methods that UniPrefill is compared with, such as `Method.parse("xattention")`.
        With a `shape` the programs are those of all batches that fit into it (of each data replica's share, on a mesh).
        Raises InputError for an empty prompt, ids outside the vocabulary, or a prompt over the model's length.
        """
        ids = self._checked(prompts)
        return self._by_setting(
            ids,
            config or self.default_config,
            lambda own, programs, share: self._prefill(programs, [ids[at] for at in share], own, shape).results,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        config: Setting | None = None,
        sampling: SamplingConfig | None = None,
        *,
        continuations: Sequence[Prompt] | None = None,
        shape: BatchShape | None = None,
    ) -> list[Completion]:
        """Prefill a ragged batch and decode until every request has ended; one completion each.

        `continuations` (one per prompt, perhaps empty) are tokens that follow the prompts: they are fed one by one over
        what the prefill kept, as later turns of a conversation are, and only after them tokens are drawn. Nothing is
        dropped for them, and their log-probabilities are in the completions. `shape` as for `prefill`.
        """
        drawn, ids = sampling or SamplingConfig(), self._checked(prompts)
        given = self._continuations(continuations, ids)

        def work(own: Setting, programs: Programs, share: list[int]) -> list[Completion]:
            batch = self._prefill(programs, [ids[at] for at in share], own, shape)
            return self._complete(batch, drawn, [given[at] for at in share])

        return self._by_setting(ids, config or self.default_config, work)

    def _complete(self, batch: _PrefilledBatch, sampling: SamplingConfig, given: list[list[int]]) -> list[Completion]:
        limits = self._token_limits(batch, sampling, given)
        texts = [
            GrowingText(self.tokenizer, sampling, limit - len(tokens))
            for limit, tokens in zip(limits, given, strict=True)
        ]
        # The host looks at the tokens when all are there, or, where a text may end the request, now and then.
        steps = STEPS_BETWEEN_STOPS if sampling.stop else max(limits)
        logprobs, compiling, number = [], 0.0, 0
        start = time.perf_counter()
        for piece in self._decode(batch, sampling, given, limits, steps):
            logprobs.append(piece.logprobs)
            compiling += piece.compile_seconds
            for tokens in piece.tokens:
                for text, own, token in zip(texts, given, tokens, strict=True):
                    if number >= len(own):
                        text.push(int(token))
                number += 1
            if all(text.ended for text in texts):
                break
        seconds = time.perf_counter() - start - compiling
        likely = np.concatenate(logprobs)
        return [
            Completion(
                token_ids=text.token_ids,
                text=text.finish(),
                finish_reason=text.finish_reason,
                prefill=result,
                decode_seconds=seconds,
                decode_compile_seconds=compiling,
                continuation_logprobs=likely[: len(own), request].copy(),
            )
            for request, (text, own, result) in enumerate(zip(texts, given, batch.results, strict=True))
        ]

    def stream(
        self, prompt: Prompt, config: Setting | None = None, sampling: SamplingConfig | None = None
    ) -> Iterator[tuple[int, str]]:
        """Generate for one prompt, yielding (token id, new text) as soon as each token is known.

        Text that may turn out to be part of a stop string is held back until it is settled.
        """
        sampling = sampling or SamplingConfig()
        ids = self._checked([prompt])
        own = (config or self.default_config).for_length(len(ids[0]))
        batch = self._prefill(self.programs, ids, own)
        limits = self._token_limits(batch, sampling, [[]])
        text = GrowingText(self.tokenizer, sampling, *limits)
        for piece in self._decode(batch, sampling, [[]], limits, steps=1):
            token = int(piece.tokens[0, 0])
            yield token, text.push(token)
            if text.ended:
                return

    def _by_setting[Result](
        self,
        prompts: list[list[int]],
        setting: Setting,
        work: Callable[[Setting, Programs, list[int]], list[Result]],
    ) -> list[Result]:
        """`work` on the prompts, those together whose lengths have the same setting; results in the prompts' order."""
        groups: dict[Setting, list[int]] = {}
        for number, prompt in enumerate(prompts):
            groups.setdefault(setting.for_length(len(prompt)), []).append(number)
        results: dict[int, Result] = {}
        for own, numbers in groups.items():
            found = self._on_replicas(
                [prompts[number] for number in numbers],
                lambda programs, share, own=own, numbers=numbers: work(own, programs, [numbers[at] for at in share]),
            )
            results |= dict(zip(numbers, found, strict=True))
        return [results[number] for number in range(len(prompts))]

    def _on_replicas[Result](
        self, prompts: list[list[int]], work: Callable[[Programs, list[int]], list[Result]]
    ) -> list[Result]:
        """`work` on every replica with the numbers of its share of the prompts; the results in the prompts' order."""
        shares = deal([len(prompt) for prompt in prompts], len(self.replicas))
        return on_each(self.replicas, shares, work)

    def _checked(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        ids = [self._token_ids(prompt) for prompt in prompts]
        self._check(ids)
        return ids

    def _continuations(self, continuations: Sequence[Prompt] | None, prompts: list[list[int]]) -> list[list[int]]:
        if continuations is None:
            return [[] for _ in prompts]
        given = [self._token_ids(continuation) for continuation in continuations]
        if len(given) != len(prompts):
            raise InputError(f"{len(given)} continuations for {len(prompts)} prompts; give one each, [] for none")
        self._check([prompt + tokens for prompt, tokens in zip(prompts, given, strict=True)])
        return given

    def checked_tokens(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; InputError where `prefill` would raise it."""
        return self._checked([prompt])[0]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("this model has no tokenizer; pass token ids instead of text")
            return self.tokenizer.encode(prompt)
        wrong = next(
            (token for token in prompt if isinstance(token, bool) or not isinstance(token, int | np.integer)), None
        )
        if wrong is not None:
            raise InputError(f"a prompt holds {wrong!r}, which is no token id; pass text or a flat list of integers")
        return [int(token) for token in prompt]

    def _check(self, prompts: list[list[int]]) -> None:
        if not prompts:
            raise InputError("no prompt given; pass at least one")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise InputError(f"prompt {number} is empty; a prompt needs at least one token")
            if len(prompt) > self.config.max_position:
                raise InputError(
                    f"prompt {number} has {len(prompt)} tokens, the model takes at most {self.config.max_position}; "
                    "shorten it"
                )
            wrong = next((token for token in prompt if not 0 <= token < self.config.vocab_size), None)
            if wrong is not None:
                raise InputError(
                    f"prompt {number} holds token id {wrong}, outside the vocabulary [0, {self.config.vocab_size}); "
                    "was it made with another tokenizer?"
                )

    def _prefill(
        self,
        programs: Programs,
        prompts: list[list[int]],
        config: Setting,
        shape: BatchShape | None = None,
    ) -> _PrefilledBatch:
        lengths = [len(prompt) for prompt in prompts]
        if shape is not None and (len(lengths) > shape.requests or max(lengths) > shape.length):
            raise InputError(
                f"{len(lengths)} prompts of up to {max(lengths)} tokens do not fit into a batch of {shape.requests} of "
                f"{shape.length}; split it, or compile for more"
            )
        plan = PrefillPlan.for_batch(
            self.config,
            config,
            resolve_drop_layers(Method.of(config).dropping, self.config),
            lengths if shape is None else [shape.length] * shape.requests,
            DTYPES[self.dtype],
            on_mesh=self.mesh is not None,
        )
        tokens = np.zeros(plan.num_rows, np.int32)
        tokens[: sum(lengths)] = np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts])
        cu_seqlens = np.full(plan.num_requests + 1, sum(lengths), np.int32)
        cu_seqlens[: len(lengths) + 1] = np.cumsum([0, *lengths])
        run, compile_seconds = programs.prefill(plan, *programs.put((tokens, cu_seqlens)))
        start = time.perf_counter()
        output = jax.block_until_ready(run())
        seconds = time.perf_counter() - start
        host = jax.device_get(output._replace(caches={}))
        results = [self._result(plan, host, request, seconds, compile_seconds) for request in range(len(prompts))]
        longest, new_tokens = (prompt_bucket(max(lengths)), 1) if shape is None else (shape.length, shape.new_tokens)
        return _PrefilledBatch(programs, plan, output, results, longest, new_tokens)

    def _result(
        self, plan: PrefillPlan, output: PrefillOutput, request: int, seconds: float, compile_seconds: float
    ) -> PrefillResult:
        """Everything about one request, from a batch's output on the host."""
        spans = [(int(cu[request]), int(cu[request + 1])) for cu in output.segments.cu_seqlens]
        positions = [row[start:stop] for row, (start, stop) in zip(output.segments.positions, spans, strict=True)]
        lengths = [stop - start for start, stop in spans]
        segment_of_layer = plan.segment_of_layer
        mixers = [layer.mixer for layer in self.config.layers]
        kept_rows = lengths[0] if plan.compression is None else plan.compression.most_rows
        kv_lengths = [
            0 if mixer == "linear" else min(lengths[segment], kept_rows if mixer == "full" else lengths[segment])
            for mixer, segment in zip(mixers, segment_of_layer, strict=True)
        ]
        computed = plan.computed_by_layer(output.computed, request)
        block_mass, cut_margin, discarded = {}, {}, {}
        for number, layer in enumerate(plan.drop_layers):
            assert output.drops is not None
            scored = lengths[segment_of_layer[layer]]
            num_blocks = -(-scored // plan.config.block_size)
            block_mass[layer] = output.drops.block_mass[number, request, :num_blocks]
            cut_margin[layer] = float(output.drops.cut_margin[number, request])
            discarded[layer] = float(output.drops.discarded_mass[number, request])
        return PrefillResult(
            logits=np.asarray(output.logits[request]),
            kept_positions={layer: positions[number + 1] for number, layer in enumerate(plan.drop_layers)},
            block_mass=block_mass,
            cut_margin=cut_margin,
            kv_lengths=np.asarray(kv_lengths, np.int32),
            segment_of_layer=segment_of_layer,
            segment_lengths=tuple(lengths),
            flop_fraction=plan.flops(positions, computed) / plan.dense_flops(positions[0]),
            discarded_mass=discarded,
            seconds=seconds,
            compile_seconds=compile_seconds,
            computed_attention=computed,
        )

    def _token_limits(self, batch: _PrefilledBatch, sampling: SamplingConfig, given: list[list[int]]) -> list[int]:
        """Most tokens after each prompt, given ones included.

        The one after the model's last position can be drawn, but not fed back.
        """
        return [
            min(len(tokens) + sampling.max_tokens, self.config.max_position - result.segment_lengths[0] + 1)
            for tokens, result in zip(given, batch.results, strict=True)
        ]

    def _decode(
        self,
        batch: _PrefilledBatch,
        sampling: SamplingConfig,
        given: list[list[int]],
        limits: list[int],
        steps: int,
    ) -> Iterator[_DecodedPiece]:
        """Tokens of every request, `steps` at a time, until all have ended or the last one's limit is reached."""
        programs, slots, count = batch.programs, batch.plan.num_requests, len(batch.results)
        limit, some_given = max(limits), any(given)
        capacity = _capacity(max(limit, batch.new_tokens))
        plan = DecodePlan.after(batch.plan, capacity, longest=batch.longest, logprobs=some_given)
        wanted = np.full((plan.capacity, slots), -1, np.int32)
        for request, tokens in enumerate(given):
            wanted[: len(tokens), request] = tokens
        ends = () if self.tokenizer is None or sampling.ignore_eos else self.tokenizer.eos_token_ids
        end_tokens = np.asarray(ends, np.int32)

        kind, numbers = SamplingKind.of(sampling), programs.put(SamplingNumbers.of(sampling))
        tokens, compiling = programs.sample(kind, numbers, batch.output.logits)
        drawn = np.asarray(tokens)
        first = np.where(wanted[0] < 0, drawn, wanted[0])
        own = np.zeros((1, count))
        if some_given:
            own[0] = [_logprob(result.logits, token) for result, token in zip(batch.results, first, strict=False)]
        yield _DecodedPiece(first[None, :count], own, compiling)
        ended = (wanted[0] < 0) & np.isin(first, end_tokens)
        ended[count:] = True
        if limit == 1 or ended.all():
            return
        run, compiling = programs.start_decode(plan, batch.output, *programs.put((first, ended)))
        continuation = Continuation(*programs.put((wanted, end_tokens)))
        for start in range(0, limit - 1, steps):
            stop = min(start + steps, limit - 1)
            run, seconds = programs.decode(
                plan,
                kind,
                numbers,
                batch.output.caches,
                batch.output.segments,
                continuation,
                run,
                programs.put(np.int32(stop)),
            )
            tokens, logprobs = jax.device_get((run.tokens, run.logprobs))
            known = slice(start + 1, stop + 1)
            likely = np.zeros((stop - start, count), np.float32) if logprobs is None else logprobs[known, :count]
            yield _DecodedPiece(tokens[known, :count], likely, compiling + seconds)
            compiling = 0.0


class GrowingText:
    """One request's tokens as they come, their text, and whether it has ended."""

    def __init__(self, tokenizer: "Tokenizer | None", sampling: SamplingConfig, limit: int):
        if sampling.stop and tokenizer is None:
            raise InputError("stop strings need a tokenizer, and this model has none; use max_tokens instead")
        self.sampling = sampling
        self.limit = limit
        self.token_ids: list[int] = []
        self.ended = False
        self.finish_reason = "length"
        self._eos = () if tokenizer is None or sampling.ignore_eos else tokenizer.eos_token_ids
        self._decoder = None if tokenizer is None else tokenizer.stream_decoder()
        self._text = ""
        self._shown = 0

    def push(self, token: int) -> str:
        """Take one more token; returns the text that is now certain."""
        if self.ended:
            return ""
        self.token_ids.append(token)
        if token in self._eos:
            self._end("stop")
        elif self._decoder is not None:
            self._text += self._decoder.push(token)
            stops = [at for at in (self._text.find(stop) for stop in self.sampling.stop) if at >= 0]
            if stops:
                self._text = self._text[: min(stops)]
                self._end("stop")
        if not self.ended and len(self.token_ids) == self.limit:
            self._end("length")
        return self._settled()

    def finish(self) -> str:
        """The whole text."""
        if not self.ended:
            self._end("length")
        return self._text

    def _end(self, reason: str) -> None:
        self.ended = True
        self.finish_reason = reason
        if self._decoder is not None and reason == "length":
            self._text += self._decoder.finish()

    def _settled(self) -> str:
        """Text that was not handed out yet and cannot become part of a stop string."""
        held = 0
        if not self.ended:
            for stop in self.sampling.stop:
                overlaps = (size for size in range(1, len(stop)) if self._text.endswith(stop[:size]))
                held = max([held, *overlaps])
        settled = max(len(self._text) - held, self._shown)
        new = self._text[self._shown : settled]
        self._shown = settled
        return new


def _replicas(
    model: CausalLM, parameters: dict[str, jax.Array], rules: ShardingRules, dtype: jnp.dtype
) -> list[Programs]:
    """Programs of every data replica, on the parts of the parameters that already lie on its devices."""
    replicas = []
    for mesh in replicas_of(rules.mesh):
        own = {path: on_replica(array, rules.mesh, mesh) for path, array in parameters.items()}
        replicas.append(Programs(model, with_parameters(model, own), dtype, ShardingRules(mesh, rules.mesh_axes)))
    return replicas


def _logprob(logits: Float[np.ndarray, " vocab"], token: int) -> float:
    """Natural log-probability of one token."""
    shifted = logits - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum()))


def _capacity(tokens: int) -> int:
    """Room for generated tokens: a power of two, so that few step programs are compiled."""
    return 1 << max(4, (tokens - 1).bit_length())
