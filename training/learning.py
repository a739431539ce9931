"""Loss, optimiser and the compiled training step."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jaxtyping import Array, Float, Int32

from training.documents import ASKING, TASKS
from training.forward import hidden_states
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.parameters import parameter_specs, with_parameters

LANGUAGE_WEIGHT = 0.3  # of the next-token loss over all tokens, beside the loss over answers
# Of the next-token loss over questions: what they ask for is spelled as in the text, and finding it there by its first
# token is the same skill as answering, exercised on more tokens and by the rows that score a prompt.
QUESTION_WEIGHT = 0.3
BALANCE_WEIGHT = 0.01
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0

Parameters = dict[str, jax.Array]


class Batch(NamedTuple):
    """Documents of one length.

    Attributes:
        tokens: the documents.
        question: number of the question whose answer a token is part of; `ASKING` in a question; -1 elsewhere.
        tasks: index in `TASKS` of every question's task; -1 where a document has fewer questions.
    """

    tokens: Int32[Array, "B L"]
    question: Int32[Array, "B L"]
    tasks: Int32[Array, "B questions"]


class Metrics(NamedTuple):
    """Losses, and per task the questions asked and those whose answer had every token right."""

    answer_loss: Float[Array, ""]
    question_loss: Float[Array, ""]
    language_loss: Float[Array, ""]
    balance: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    asked: Float[Array, " tasks"]
    right: Float[Array, " tasks"]


@struct.dataclass
class TrainingState:
    """Float32 parameters by path, and the optimiser's state."""

    parameters: Parameters
    optimiser: Any


def make_optimiser(model: CausalLM) -> optax.GradientTransformation:
    """AdamW without the learning rate, which every step is given; decay for matrices and embeddings alone."""
    matrices = {path: len(spec.shape) > 1 for path, spec in parameter_specs(model).items()}
    return optax.chain(
        optax.clip_by_global_norm(GRADIENT_NORM),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=matrices),
    )


def start(model: CausalLM, parameters: Parameters) -> TrainingState:
    """The state before the first step."""
    return TrainingState(parameters, make_optimiser(model).init(parameters))


def in_model_dtype(model: CausalLM, parameters: Parameters) -> CausalLM:
    """The model with its parameters rounded to the type it computes in: the one that is saved."""
    dtypes = {path: variable.get_value().dtype for path, variable in _variables(model)}
    rounded = {path: value.astype(dtypes[path]) for path, value in parameters.items()}
    return nnx.merge(nnx.graphdef(model), with_parameters(model, rounded))


def loss(model: CausalLM, parameters: Parameters, batch: Batch) -> tuple[Float[Array, ""], Metrics]:
    """Cross-entropy of answers, and shares of that of questions, of that of all tokens, and of the experts' balance."""
    with_values = in_model_dtype(model, parameters)
    x, balance = hidden_states(with_values, batch.tokens)
    logits = with_values.logits(x).reshape(*batch.tokens.shape, -1)[:, :-1]
    targets, question = batch.tokens[:, 1:], batch.question[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    answers = question >= 0
    answer_loss, question_loss, language_loss = (
        losses.mean(where=where) for where in (answers, question == ASKING, jnp.ones_like(answers))
    )
    asked, right = _count(answers & (logits.argmax(axis=-1) != targets), question, batch.tasks)
    total = answer_loss + QUESTION_WEIGHT * question_loss + LANGUAGE_WEIGHT * language_loss + BALANCE_WEIGHT * balance
    return total, Metrics(answer_loss, question_loss, language_loss, balance, jnp.zeros(()), asked, right)


def train_steps(
    model: CausalLM, state: TrainingState, batches: Batch, rates: Float[Array, " steps"]
) -> tuple[TrainingState, Metrics]:
    """One step per batch (stacked on the leading axis) with its learning rate; metrics of every step."""
    optimiser = make_optimiser(model)

    def step(state: TrainingState, inputs: tuple[Batch, Array]) -> tuple[TrainingState, Metrics]:
        batch, rate = inputs
        gradient = jax.grad(partial(loss, model), has_aux=True)
        gradients, metrics = gradient(state.parameters, batch)
        updates, optimiser_state = optimiser.update(gradients, state.optimiser, state.parameters)
        parameters = jax.tree.map(lambda value, update: value - rate * update, state.parameters, updates)
        metrics = metrics._replace(gradient_norm=optax.tree.norm(gradients))
        return TrainingState(parameters, optimiser_state), metrics

    return jax.lax.scan(step, state, (batches, rates))


def _count(
    wrong: Array, question: Int32[Array, "B L"], tasks: Int32[Array, "B questions"]
) -> tuple[Float[Array, " tasks"], Float[Array, " tasks"]]:
    """Questions of each task, and those without a wrong token."""
    documents = jnp.arange(question.shape[0])[:, None]
    spare = jnp.where(question >= 0, question, tasks.shape[1])
    mistakes = jnp.zeros(tasks.shape, jnp.int32).at[documents, spare].add(wrong.astype(jnp.int32), mode="drop")
    of_task = jax.nn.one_hot(tasks, len(TASKS), dtype=jnp.float32)
    return of_task.sum(axis=(0, 1)), (of_task * (mistakes == 0)[..., None]).sum(axis=(0, 1))


def _variables(model: CausalLM) -> list[tuple[str, nnx.Variable]]:
    return [(".".join(map(str, path)), variable) for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))]
