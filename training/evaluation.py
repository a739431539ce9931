"""Accuracy of a model on synthetic questions: dense, and with blocks dropped by the library's rule, at random, by age.

The other choices keep as many tokens after each drop as the rule did on the same prompt, so that what differs is which.
An answer counts if every one of its tokens is the likeliest, given those before it: what greedy decoding would write.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.top_p_select.reference import gather_indices
from training.documents import Pieces, make_prompt
from training.forward import Mixed, Rows, mix, transform
from training.learning import Parameters, in_model_dtype
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.models.batch import last_rows
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.sparsify.drop import DropInputs, choose_tokens
from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers

ANSWER_ROOM = 64
Choice = Literal["dense", "rule", "random", "recent"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


class Probes(NamedTuple):
    """Prompts of one length, each followed by its answer and padding.

    Attributes:
        tokens: prompt, answer, padding.
        answer_length: tokens of every answer.
    """

    tokens: Int32[Array, "B L"]
    answer_length: Int32[Array, " B"]


class Answers(NamedTuple):
    """Whether each answer was right, and how many prompt tokens were left after every drop."""

    right: Bool[Array, " B"]
    kept: Int32[Array, "drops B"]


def make_probes(pieces: Pieces, task: str, length: int, samples: int, seed: int) -> Probes:
    """Prompts of exactly `length` tokens; the same seed gives the same prompts."""
    random = np.random.default_rng([seed, length, *task.encode()])
    tokens = np.zeros((samples, length + ANSWER_ROOM), np.int32)
    lengths = np.zeros(samples, np.int32)
    for row in range(samples):
        prompt, answer = make_prompt(pieces, task, length, random)
        tokens[row, :length], tokens[row, length : length + len(answer)] = prompt, answer
        lengths[row] = len(answer)
    return Probes(jnp.asarray(tokens), jnp.asarray(lengths))


class Evaluator:
    """Compiled evaluation of one rule: one program serves all choices of blocks, every top_p and task of a length."""

    def __init__(self, model: CausalLM, config: UniPrefillConfig, batch: int = 32):
        """`batch` prompts run at a time."""
        self._drop_layers = resolve_drop_layers(config, model.config)
        self._run = jax.jit(partial(_answers, model, config, self._drop_layers))
        self._config, self._batch = config, batch

    @property
    def drop_layers(self) -> tuple[int, ...]:
        """The layers at which tokens are dropped."""
        return self._drop_layers

    def accuracy(self, parameters: Parameters, probes: Probes, top_p: float, seed: int = 0) -> dict[str, Any]:
        """Share of right answers for every choice of blocks, and the mean share of the prompt kept after each drop."""
        prompt_length = probes.tokens.shape[1] - ANSWER_ROOM
        outcomes: dict[str, list[np.ndarray]] = {choice: [] for choice in CHOICES}
        kept = []
        for number, part in enumerate(self._parts(probes)):
            rule = jax.device_get(self.answers(parameters, part, "rule", top_p=top_p))
            kept.append(rule.kept)
            outcomes["rule"].append(rule.right)
            for choice in CHOICES:
                if choice != "rule":
                    answers = self.answers(parameters, part, choice, rule.kept, seed=seed + number)
                    outcomes[choice].append(np.asarray(answers.right))
        accuracies = {choice: float(np.concatenate(parts).mean()) for choice, parts in outcomes.items()}
        kept_share = np.concatenate(kept, axis=1).mean(axis=1) / prompt_length
        return {**accuracies, "kept": [round(float(share), 4) for share in kept_share]}

    def answers(
        self,
        parameters: Parameters,
        probes: Probes,
        choice: Choice,
        kept: np.ndarray | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Answers:
        """One batch under one choice of blocks; "random" and "recent" keep as many tokens as `kept` [drops, B] says."""
        batch, length = probes.tokens.shape
        prompt_length = length - ANSWER_ROOM
        shape = (len(self._drop_layers), batch)
        num_blocks = -(-length // self._config.block_size)
        ranking = np.broadcast_to(np.arange(num_blocks, dtype=np.float32), (*shape, num_blocks))
        if choice == "random":
            ranking = np.random.default_rng(seed).random((*shape, num_blocks), np.float32)
        if kept is None and choice in ("random", "recent"):
            raise ValueError(f"the choice {choice!r} needs to know how many tokens to keep; pass those of the rule")
        budget = np.full(shape, prompt_length, np.int32) if choice in ("dense", "rule") else kept
        return self._run(
            parameters, probes, choice == "rule", jnp.float32(top_p), jnp.asarray(ranking), jnp.asarray(budget)
        )

    def _parts(self, probes: Probes) -> Iterator[Probes]:
        samples = probes.tokens.shape[0]
        if samples % self._batch:
            raise ValueError(f"{samples} samples do not divide into batches of {self._batch}; use a multiple")
        for first in range(0, samples, self._batch):
            yield Probes(*(array[first : first + self._batch] for array in probes))


def evaluate(
    model: CausalLM,
    parameters: Parameters,
    pieces: Pieces,
    config: UniPrefillConfig,
    top_ps: Sequence[float],
    lengths: Sequence[int],
    tasks: Sequence[str],
    samples: int,
    seed: int = 1,
) -> Iterator[dict[str, Any]]:
    """One row of a result file per length, top_p and task, as soon as it is known; `config.top_p` is not used."""
    evaluator = Evaluator(model, config, batch=min(32, samples))
    for length, top_p, task in itertools.product(lengths, top_ps, tasks):
        probes = make_probes(pieces, task, length, samples, seed)
        yield {
            "task": task,
            "length": length,
            "samples": samples,
            "drop_layers": list(evaluator.drop_layers),
            "top_p": top_p,
            "score": config.score,
            "score_memory": config.score_memory,
            "top_p_over": config.top_p_over,
            **evaluator.accuracy(parameters, probes, top_p),
        }


def _answers(
    model: CausalLM,
    config: UniPrefillConfig,
    drop_layers: tuple[int, ...],
    parameters: Parameters,
    probes: Probes,
    by_rule: Bool[Array, ""],
    top_p: Float[Array, ""],
    ranking: Float[Array, "drops B blocks"],
    budget: Int32[Array, "drops B"],
) -> Answers:
    """Run prompts and answers with drops: by the rule, or the `budget` tokens of the highest ranking.

    After every drop what is left of a prompt lies at the front of its rows, its answer behind it, padding after that.
    """
    model = in_model_dtype(model, parameters)
    batch, length = probes.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    count = jnp.full(batch, length - ANSWER_ROOM, jnp.int32)
    scores = jnp.zeros((batch, length), jnp.float32)
    x = model.embed(probes.tokens.reshape(-1))
    kept = []
    for number, layer in enumerate(model.config.layers):
        module = model.layer(layer.kind, model.config.index_in_kind(number))
        mixed = mix(module, x, Rows(positions.reshape(-1), batch))
        x = mixed.x
        if number in drop_layers:
            drop = drop_layers.index(number)
            choose = partial(_choose_rows, config, model.config.attention_scale, drop > 0, by_rule, top_p)
            inputs = (*_per_sequence(mixed, batch), count, scores, ranking[drop], budget[drop])
            order, count, scores = jax.lax.map(lambda one, choose=choose: choose(*one), inputs)
            x, positions, scores = (
                jnp.take_along_axis(array, order.reshape(batch, length, *(1,) * (array.ndim - 2)), axis=1)
                for array in (x.reshape(batch, length, -1), positions, scores)
            )
            x = x.reshape(batch * length, -1)
            kept.append(count)
        x, _ = transform(module, x)
    # The row before an answer's token is the one that foretells it.
    rows = count[:, None] - 1 + jnp.arange(ANSWER_ROOM)
    before = jnp.take_along_axis(x.reshape(batch, length, -1), rows[..., None], axis=1)
    foretold = model.logits(before.reshape(-1, x.shape[-1])).argmax(axis=-1).reshape(batch, ANSWER_ROOM)
    matches = foretold == probes.tokens[:, -ANSWER_ROOM:]
    beyond = jnp.arange(ANSWER_ROOM) >= probes.answer_length[:, None]
    return Answers((matches | beyond).all(axis=1), jnp.stack(kept))


def _choose_rows(
    config: UniPrefillConfig,
    scale: float,
    has_memory: bool,
    by_rule: Bool[Array, ""],
    top_p: Float[Array, ""],
    queries: Float[Array, "L H d"],
    keys: Float[Array, "L KV d"],
    count: Int32[Array, ""],
    scores: Float[Array, " L"],
    ranking: Float[Array, " blocks"],
    budget: Int32[Array, ""],
) -> tuple[Int32[Array, " L"], Int32[Array, ""], Float[Array, " L"]]:
    """Where each row comes from after the drop, tokens left of the prompt, and the scores that tokens carry on."""
    length, num_blocks = keys.shape[0], ranking.shape[0]
    cu_seqlens = jnp.stack([jnp.zeros_like(count), count])
    window = queries[last_rows(cu_seqlens, config.window_tokens)]
    drop = choose_tokens(
        DropInputs(window, keys, cu_seqlens, scores),
        config,
        top_p=top_p,
        memory=jnp.float32(config.score_memory * has_memory),
        scale=scale,
        num_blocks=num_blocks,
    )
    # Blocks between sink and window, which a budget is spent on; whole ones where lengths are multiples of a block.
    block = jnp.arange(num_blocks)
    free = (block * config.block_size >= config.sink_tokens) & (
        (block + 1) * config.block_size <= count - config.window_tokens
    )
    wanted = (budget - config.sink_tokens - config.window_tokens) // config.block_size
    place = jnp.argsort(jnp.argsort(jnp.where(free, -ranking, jnp.inf)))
    other, other_cu_seqlens = gather_indices(
        (free & (place < wanted))[None],
        cu_seqlens,
        num_rows=length,
        block_size=config.block_size,
        sink_tokens=config.sink_tokens,
        window_tokens=config.window_tokens,
    )
    indices = jnp.where(by_rule, drop.indices, other)
    left = jnp.where(by_rule, drop.cu_seqlens[1], other_cu_seqlens[1])
    row = jnp.arange(length, dtype=jnp.int32)
    order = jnp.where(row < left, indices, jnp.minimum(row - left + count, length - 1))
    return order, left, drop.token_scores


def _per_sequence(mixed: Mixed, batch: int) -> tuple[Array, Array]:
    if mixed.queries is None or mixed.keys is None:
        raise ValueError("only layers of full attention can drop tokens; check the drop layers")
    queries, keys = (array.reshape(batch, -1, *array.shape[1:]) for array in (mixed.queries, mixed.keys))
    return queries, keys
