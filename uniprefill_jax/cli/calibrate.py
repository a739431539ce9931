"""`uniprefill calibrate`: a model's own setting."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from uniprefill_jax.cli import eval as evaluation
from uniprefill_jax.cli import options, prompts
from uniprefill_jax.errors import InputError

if TYPE_CHECKING:
    from uniprefill_jax.eval.calibration import Calibration, Measured

# Not RULER's own seed nor its first questions: what is chosen here is reported on other prompts.
CALIBRATION_SEED = 1042
FIRST_QUESTION = 500


def calibrate(
    model: options.ModelArgument,
    max_loss: Annotated[
        float, typer.Option(help="Most points lost on average over RULER's tasks, at the upper confidence limit.")
    ] = 0.5,
    data: Annotated[
        Path | None, typer.Option(help="Folder with RULER's validation.jsonl files, instead of generating.")
    ] = None,
    lengths: evaluation.LengthsOption = "",
    tasks: evaluation.TasksOption = "all",
    samples: Annotated[int | None, typer.Option(min=3, help="Prompts per task and length.")] = None,
    seed: evaluation.SeedOption = CALIBRATION_SEED,
    chat: prompts.ChatOption = None,
    batch_size: evaluation.BatchSizeOption = None,
    answers: evaluation.AnswersOption = None,
    name: evaluation.NameOption = None,
    out: Annotated[Path | None, typer.Option(help="Write the setting here instead of beside the model.")] = None,
    dtype: options.DataTypeOption = "auto",
    json: options.JsonOption = None,
) -> None:
    """Find the setting with the fewest operations that loses less than --max-loss, and make it MODEL's default.

    A third of the prompts serves the search, the others the confirmation.
    """
    from uniprefill_jax.calibrated import setting_path, write_setting
    from uniprefill_jax.eval.calibration import CONFIDENCE_TEXT, Calibrator, describe
    from uniprefill_jax.eval.store import AnswerStore
    from uniprefill_jax.eval.table import showing_progress
    from uniprefill_jax.result_file import device_name, installed_versions, write_result

    options.check_output(json)
    options.check_output(answers, "--answers")
    options.check_output(out, "--out")
    if not 0 < max_loss <= 100:
        raise InputError(f"--max-loss is {max_loss}; use points above 0 and up to 100")
    console = Console(stderr=True)
    tokenizer = evaluation.tokenizer_of(model)
    chosen = evaluation.ruler_samples(
        console, model, data, lengths, tasks, samples, seed, tokenizer, first_question=FIRST_QUESTION
    )
    in_chat = tokenizer.has_chat_template if chat is None else chat
    cases = [sample.case(tokenizer, in_chat) for sample in chosen]
    llm = evaluation.load_model(console, model, dtype)
    labels = {
        "model": name or model,
        "dtype": llm.dtype,
        "harness": evaluation.ruler_harness(in_chat),
        "seed": None if data is not None else seed,
    }
    store = AnswerStore(answers, labels | {"device": device_name(), "batch_size": batch_size}, [])
    found: list[Measured] = []

    def tell(measured: "Measured") -> None:
        found.append(measured)
        console.print(f"  {_line(measured)}", highlight=False, soft_wrap=True)

    with showing_progress(console) as report:
        search = Calibrator(llm, cases, store, max_loss, batch_size, lambda stage, progress: report(progress), tell)
        result = search.run()
    _print(Console(), result)
    rows = [_row(labels, measured, measured in result.tested) for measured in found]
    if json is not None:
        write_result(json, " ".join(["uniprefill", *sys.argv[1:]]), rows)
    if result.chosen is None:
        raise InputError(
            f"no setting stays under {max_loss} points with confidence; nothing was written. Allow a greater "
            "--max-loss, or give more prompts"
        )
    path = out or setting_path(model)
    evidence = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "versions": installed_versions(),
        **labels,
        "max_loss": max_loss,
        "confidence": CONFIDENCE_TEXT,
        "loss": round(result.chosen.loss, 4),
        "loss_limit": round(result.chosen.limit, 4),
        "flop_fraction": round(result.chosen.flop_fraction, 4),
        "prompts": result.chosen.prompts,
        "lengths": sorted({case.length for case in cases}),
        "tasks": list(result.tasks),
        "left_out": {task: round(score, 1) for task, score in result.left_out.items()},
    }
    write_setting(path, result.chosen.config, evidence)
    console.print(f"wrote {path}: {describe(result.chosen.config)}", highlight=False, markup=False)


def _line(measured: "Measured") -> str:
    from uniprefill_jax.eval.calibration import describe

    return (
        f"{measured.flop_fraction:.3f} of FLOPs, loss {measured.loss:+.2f} (limit {measured.limit:.2f}) on "
        f"{measured.prompts:,} prompts: {describe(measured.config)}"
    )


def _print(console: Console, result: "Calibration") -> None:
    console.print(f"tasks: {', '.join(result.tasks)}", highlight=False)
    for task, score in result.left_out.items():
        console.print(f"left out: {task}; dense scores {score:.1f}", highlight=False)
    console.print("confirmed on prompts that the search has not seen, the safest first:", highlight=False)
    for measured in result.tested:
        passed = measured is result.chosen
        console.print(f"{'*' if passed else ' '} {_line(measured)}", highlight=False, soft_wrap=True)


def _row(labels: dict[str, Any], measured: "Measured", confirmed: bool) -> dict[str, Any]:
    from uniprefill_jax.eval.calibration import describe

    return labels | {
        "config": describe(measured.config),
        "loss": round(measured.loss, 4),
        "loss_limit": round(measured.limit, 4),
        "flop_fraction": round(measured.flop_fraction, 4),
        "prompts": measured.prompts,
        "confirmed": confirmed,
    }
