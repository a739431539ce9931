"""Evaluate a trained model: dense, and with blocks dropped by rule, at random, by age.

    python -m training.evaluate FOLDER --json FILE
    python -m training.evaluate FOLDER --lengths 4096 --drop-layers 1,3,5 --top-p 0.99,0.9 --tasks single --json FILE

Without --lengths the settings of `EVALUATIONS` are run one after another. Rows are written as they come.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from checkpoints_convert import load_parameters, open_checkpoint
from training.architecture import make_model
from training.documents import TASKS, Pieces
from training.evaluation import CHOICES, evaluate
from training.learning import Parameters
from training.vocabulary import build_tokenizer
from uniprefill_jax.config import UniPrefillConfig
from uniprefill_jax.models.causal_lm import CausalLM, ignored_tensors
from uniprefill_jax.models.parameters import parameter_specs
from uniprefill_jax.result_file import write_result

Evaluations = Sequence[tuple[UniPrefillConfig, tuple[float, ...], tuple[int, ...]]]
# Rules, their top_p and prompt lengths, the most telling first: the clock may not leave time for all.
EVALUATIONS: Evaluations = (
    (UniPrefillConfig(drop_layers=(1,)), (0.9, 0.7), (4096,)),
    (UniPrefillConfig(), (0.99, 0.9), (4096,)),
    (UniPrefillConfig(drop_layers=(1, 3, 5)), (0.9,), (4096, 1024, 8192, 2048)),
)


def main() -> None:
    """Load, evaluate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a trained model")
    parser.add_argument("--lengths", type=_integers, help="prompt lengths, multiples of 64")
    parser.add_argument("--tasks", type=lambda text: tuple(text.split(",")), default=TASKS)
    parser.add_argument("--drop-layers", type=_integers, help="default: those of 'auto'")
    parser.add_argument("--top-p", type=_numbers, default=(0.99,), help="one or more")
    parser.add_argument("--score", choices=("mean", "peak"), default="mean")
    parser.add_argument("--score-memory", type=float, default=0.0)
    parser.add_argument("--top-p-over", choices=("all", "candidates"), default="all")
    parser.add_argument("--samples", type=int, default=64, help="prompts per task and length: below 32, or a multiple")
    parser.add_argument("--minutes", type=float, default=math.inf, help="most that is spent")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    unknown = [task for task in arguments.tasks if task not in TASKS]
    if unknown:
        parser.error(f"--tasks names {unknown[0]!r}; known are {', '.join(TASKS)}")
    source = open_checkpoint(arguments.model)
    model = make_model(source.config)
    parameters = load_parameters(
        source, parameter_specs(model), dtype=jnp.float32, ignore=ignored_tensors(model.config)
    )
    evaluations = EVALUATIONS
    if arguments.lengths:
        config = UniPrefillConfig(
            drop_layers=arguments.drop_layers or "auto",
            score=arguments.score,
            score_memory=arguments.score_memory,
            top_p_over=arguments.top_p_over,
        )
        evaluations = ((config, arguments.top_p, arguments.lengths),)
    evaluate_until(
        time.monotonic() + 60 * arguments.minutes,
        arguments.json,
        model,
        parameters,
        Pieces(build_tokenizer()),
        arguments.samples,
        f"python -m training.evaluate FOLDER --samples {arguments.samples}",
        arguments.tasks,
        evaluations,
    )


def evaluate_until(
    deadline: float,
    path: Path,
    model: CausalLM,
    parameters: Parameters,
    pieces: Pieces,
    samples: int,
    command: str,
    tasks: Sequence[str] = TASKS,
    evaluations: Evaluations = EVALUATIONS,
) -> None:
    """Evaluate, printing and writing each row as it comes, until all is done or the (monotonic) clock says so.

    `command` is what the result file says that it was made by.
    """
    rows: list[dict[str, Any]] = []
    for config, top_ps, lengths in evaluations:
        for row in evaluate(model, parameters, pieces, config, top_ps, lengths, tasks, samples):
            rows.append(row)
            accuracies = " ".join(f"{choice} {row[choice]:.2f}" for choice in CHOICES)
            setting = f"drop {row['drop_layers']} p {row['top_p']}"
            print(f"{setting} {row['length']} {row['task']}: {accuracies} kept {row['kept']}", flush=True)
            write_result(path, command, rows)
            if time.monotonic() > deadline:
                print("time is up; what is left was not evaluated", flush=True)
                return


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
