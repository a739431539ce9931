"""Train the model for a number of minutes and write it as a Hugging Face folder.

    python -m training.train --output OUT --minutes 7 --evaluate-minutes 1.5

The clock decides: lengths, learning rate and the end follow the share of the time that is gone once the first program
is compiled, so that any machine and any number of minutes get a whole curriculum. The folder is written again every
half minute, so that a run that is cut off leaves the last of its weights; `log.json` holds the learning curve and
`evaluation.json` the accuracies.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from training.architecture import CONFIG, count_parameters, initial_parameters, make_model
from training.batches import DocumentFactory
from training.documents import MOST_QUESTIONS, TASKS, Pieces
from training.evaluate import evaluate_until
from training.export import save_checkpoint
from training.learning import Batch, Metrics, Parameters, TrainingState, start, train_steps
from training.schedule import CURRICULUM, Stage, learning_rate
from training.vocabulary import build_tokenizer
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.result_file import write_result

STEPS_AT_ONCE = 8  # per dispatch
COMPILED_AT_ONCE = 2  # stages
SAVE_SECONDS = 30.0
PRINT_SECONDS = 10.0


def main() -> None:
    """Train, save, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write; its files are replaced")
    parser.add_argument("--minutes", type=float, default=7.0, help="of training, compilation included")
    parser.add_argument("--evaluate-minutes", type=float, default=1.5, help="most that is spent on evaluation")
    parser.add_argument("--samples", type=int, default=64, help="prompts per task and length")
    parser.add_argument("--seed", type=int, default=0, help="of weights and documents")
    parser.add_argument("--workers", type=int, default=max(1, min(10, (os.cpu_count() or 2) - 2)))
    arguments = parser.parse_args()
    began = time.monotonic()
    arguments.output.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    command = f"python -m training.train --minutes {arguments.minutes:g} --seed {arguments.seed}"
    factory = DocumentFactory(arguments.workers)
    trainer = Trainer(CONFIG, CURRICULUM, arguments.output, arguments.seed, tokenizer, factory, command)
    try:
        parameters = trainer.run(60 * arguments.minutes, began)
    finally:
        factory.close()
    evaluate_until(
        time.monotonic() + 60 * arguments.evaluate_minutes,
        arguments.output / "evaluation.json",
        trainer.model,
        parameters,
        Pieces(tokenizer),
        arguments.samples,
        command,
    )


class Trainer:
    """A run: model, documents, the folder that it writes, and the learning curve so far."""

    def __init__(
        self,
        config: dict[str, Any],
        curriculum: Sequence[Stage],
        output: Path,
        seed: int,
        tokenizer: Tokenizer,
        factory: DocumentFactory,
        command: str,
    ):
        """`config` is the model's config.json; `command` is what the log says that it was made by."""
        self.model = make_model(config)
        self._config, self._curriculum, self._factory = config, curriculum, factory
        self._output, self._seed, self._tokenizer, self._command = output, seed, tokenizer, command
        self._log: list[dict[str, Any]] = []

    def run(self, seconds: float, began: float) -> Parameters:
        """Train until `seconds` after `began` (of the monotonic clock); returns the parameters."""
        parameters = initial_parameters(self._config, self._seed)
        print(f"{count_parameters(parameters):,} parameters on {jax.devices()[0].device_kind}", flush=True)
        state = start(self.model, parameters)
        programs = Programs(self.model, state, self._curriculum)
        programs.of(self._curriculum[0])
        first = saved = time.monotonic()
        left = began + seconds - first
        step, tokens, before = 0, 0, (0, 0, first)  # before: steps, tokens and time of the last report
        for stage in self._curriculum:
            program, compile_seconds = programs.of(stage)
            print(
                f"length {stage.length}, {stage.batch} documents a step; compiled in {compile_seconds:.0f} s",
                flush=True,
            )
            shape = (STEPS_AT_ONCE, stage.batch, stage.length)
            for stack in device_stacks(self._factory.stacks(shape, self._seed)):
                now = time.monotonic()
                gone = (now - first) / left
                if gone >= stage.until:
                    break
                rates = [learning_rate(step + at, gone) for at in range(STEPS_AT_ONCE)]
                state, metrics = program(state, stack, jnp.asarray(rates, jnp.float32))
                metrics = jax.device_get(metrics)
                step += STEPS_AT_ONCE
                tokens += math.prod(shape)
                now = time.monotonic()
                if now - before[2] >= PRINT_SECONDS:
                    seconds_since = now - before[2]
                    speed = {
                        "tokens": tokens,
                        "steps_per_s": round((step - before[0]) / seconds_since, 1),
                        "tokens_per_s": round((tokens - before[1]) / seconds_since),
                    }
                    self._report(step, now - began, stage, rates[-1], metrics, speed)
                    before = (step, tokens, now)
                if not np.isfinite(metrics.answer_loss).all():
                    raise FloatingPointError(f"the loss is not finite at step {step}; lower the learning rate")
                if now - saved >= SAVE_SECONDS:
                    self._save(state.parameters)
                    saved = time.monotonic()
        programs.close()
        self._save(state.parameters)
        print(f"{step} steps in {time.monotonic() - began:.0f} s; written to {self._output}", flush=True)
        return state.parameters

    def _save(self, parameters: Parameters) -> None:
        save_checkpoint(self._output, self._config, jax.device_get(parameters), self._tokenizer)
        write_result(self._output / "log.json", self._command, self._log)

    def _report(
        self, step: int, seconds: float, stage: Stage, rate: float, metrics: Metrics, speed: dict[str, Any]
    ) -> None:
        asked, right = metrics.asked.sum(axis=0), metrics.right.sum(axis=0)
        right_share = {task: round(float(right[at] / asked[at]), 3) for at, task in enumerate(TASKS) if asked[at] > 0}
        row = {
            "step": step,
            "seconds": round(seconds, 1),
            "length": stage.length,
            "learning_rate": round(rate, 6),
            "answer_loss": round(float(metrics.answer_loss.mean()), 4),
            "question_loss": round(float(metrics.question_loss.mean()), 4),
            "language_loss": round(float(metrics.language_loss.mean()), 4),
            "balance": round(float(metrics.balance.mean()), 3),
            "gradient_norm": round(float(metrics.gradient_norm.mean()), 3),
            **speed,
            "right": right_share,
        }
        self._log.append(row)
        shares = " ".join(f"{task} {share:.2f}" for task, share in right_share.items())
        print(
            f"{seconds:5.0f} s step {step:5d} length {stage.length:4d} loss answers {row['answer_loss']:.3f} questions "
            f"{row['question_loss']:.3f} all {row['language_loss']:.3f} norm {row['gradient_norm']:.2f} | "
            f"{row['steps_per_s']:.1f} steps/s {row['tokens_per_s'] / 1e3:.0f}k tokens/s | {shares}",
            flush=True,
        )


class Programs:
    """The compiled step of every stage, made in the order of the curriculum while earlier stages train."""

    def __init__(self, model: CausalLM, state: TrainingState, curriculum: Sequence[Stage]):
        self._jitted = jax.jit(partial(train_steps, model), donate_argnums=0)
        self._state = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)
        self._pool = ThreadPoolExecutor(COMPILED_AT_ONCE)
        self._made = {stage: self._pool.submit(self._compile, stage) for stage in curriculum}

    def of(self, stage: Stage) -> tuple[Any, float]:
        """A stage's program, once it is ready, and the seconds that compiling it took."""
        return self._made[stage].result()

    def close(self) -> None:
        """Compile no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, stage: Stage) -> tuple[Any, float]:
        began = time.monotonic()
        documents = (STEPS_AT_ONCE, stage.batch)
        shapes = (*documents, stage.length), (*documents, stage.length), (*documents, MOST_QUESTIONS)
        batches = jax.eval_shape(lambda: Batch(*(jnp.zeros(shape, jnp.int32) for shape in shapes)))
        rates = jax.ShapeDtypeStruct((STEPS_AT_ONCE,), jnp.float32)
        program = self._jitted.lower(self._state, batches, rates).compile()
        return program, time.monotonic() - began


def device_stacks(stacks: Iterator[tuple[np.ndarray, ...]]) -> Iterator[Batch]:
    """Batches on the device, the next one on its way while the last is used."""
    ahead = Batch(*jax.device_put(next(stacks)))
    for stack in stacks:
        following = Batch(*jax.device_put(stack))
        yield ahead
        ahead = following


if __name__ == "__main__":
    main()
