"""`uniprefill eval`: accuracy, kept tokens and speed of the same runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from uniprefill_jax.cli import options, prompts
from uniprefill_jax.cli.reading import reading
from uniprefill_jax.errors import InputError

if TYPE_CHECKING:
    from uniprefill_jax.eval.cases import Case
    from uniprefill_jax.eval.ruler import RulerSample
    from uniprefill_jax.eval.settings import Setting
    from uniprefill_jax.llm import LLM
    from uniprefill_jax.tokenizer import Tokenizer

DEFAULT_SAMPLES = 100

evaluate = typer.Typer(help="Measure accuracy, dense against dropping, on the same prompts.", no_args_is_help=True)

ConfigOption = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        help="A setting to compare with dense: default, authors, carry, calibrated, or fields such as "
        "top_p=0.9,score=peak; drop layers as drop_layers=7+11. May be repeated.",
    ),
]
MethodOption = Annotated[
    str,
    typer.Option(
        "--method",
        help="Methods to compare, separated by commas: dense, uniprefill, minference, flexprefill, xattention, "
        "proxyattn, lazyllm, sliminfer, streaming_llm, snapkv; with fields as in xattention:threshold=0.95, together "
        "as in uniprefill+snapkv.",
    ),
]
TasksOption = Annotated[str, typer.Option(help='RULER\'s tasks, or "all".')]
LengthsOption = Annotated[str, typer.Option(help="Prompt lengths in tokens, those to generate included.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the prompts; 42 is RULER's own.")]
BatchSizeOption = Annotated[
    int | None, typer.Option(min=1, help="Most prompts at a time; by default what suits the device.")
]
NameOption = Annotated[str | None, typer.Option(help="What results call the model; by default MODEL itself.")]
AnswersOption = Annotated[
    Path | None,
    typer.Option("--answers", help="Keep every answer in this file; the same command goes on where it stopped."),
]


@evaluate.command()
def ruler(
    model: options.ModelArgument,
    config: ConfigOption = None,
    method: MethodOption = "",
    tasks: TasksOption = "all",
    lengths: LengthsOption = "",
    samples: Annotated[int | None, typer.Option(min=1, help="Prompts per task and length.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with RULER's validation.jsonl files, instead of generating.")
    ] = None,
    seed: SeedOption = 42,
    chat: prompts.ChatOption = None,
    show_prompt: Annotated[bool, typer.Option("--print-prompt", help="Show a prompt of each task, and stop.")] = False,
    batch_size: BatchSizeOption = None,
    answers: AnswersOption = None,
    name: NameOption = None,
    dtype: options.DataTypeOption = "auto",
    json: options.JsonOption = None,
) -> None:
    """RULER's 13 tasks with its own prompts and metric, dense and any number of settings and methods."""
    options.check_output(json)
    options.check_output(answers, "--answers")
    settings = _settings(model, config, method)
    console = Console(stderr=True)
    tokenizer = tokenizer_of(model)
    chosen = ruler_samples(console, model, data, lengths, tasks, samples, seed, tokenizer)
    in_chat = tokenizer.has_chat_template if chat is None else chat
    cases = [sample.case(tokenizer, in_chat) for sample in chosen]
    if show_prompt:
        _show_cases(tokenizer, cases)
        return
    llm = load_model(console, model, dtype)
    labels = {
        "model": name or model,
        "dtype": llm.dtype,
        "harness": ruler_harness(in_chat),
        "seed": seed if data is None else None,
    }
    _run(console, llm, cases, settings, labels, answers, batch_size, json)


@evaluate.command()
def prepare(
    model: options.ModelArgument,
    out: Annotated[Path, typer.Option(help="Folder for LENGTH/TASK/validation.jsonl.")],
    lengths: LengthsOption,
    tasks: TasksOption = "all",
    samples: Annotated[int, typer.Option(min=1, help="Prompts per task and length.")] = 100,
    seed: SeedOption = 42,
    first_question: Annotated[
        int, typer.Option(min=0, help="The QA tasks leave out questions before this one: they ignore the seed.")
    ] = 0,
    compress: Annotated[bool, typer.Option("--compress", help="Write .jsonl.gz files.")] = False,
) -> None:
    """Make RULER's prompts for MODEL's tokenizer, to run `eval ruler --data` where the generators are not installed."""
    from uniprefill_jax.eval import prepare as making
    from uniprefill_jax.eval.ruler import parse_tasks

    names, wanted = parse_tasks(tasks), options.numbers("--lengths", lengths, int)
    console = Console(stderr=True)
    making.prepare(model, out, names, wanted, samples, seed, first_question, _reporter(console))
    if compress:
        making.compress(out)
    console.print(f"wrote {out}", highlight=False, markup=False)


@evaluate.command()
def probes(
    model: options.ModelArgument,
    config: ConfigOption = None,
    tasks: Annotated[str, typer.Option(help='Probes, or "all".')] = "all",
    lengths: LengthsOption = "1024,2048",
    samples: Annotated[int, typer.Option(min=1, help="Prompts per probe and length.")] = 50,
    prose: Annotated[
        Path | None, typer.Option(help="A long text, at least as long as the prompts; by default a bundled one.")
    ] = None,
    seed: SeedOption = 42,
    chat: prompts.ChatOption = None,
    show_prompt: Annotated[bool, typer.Option("--print-prompt", help="Show a prompt of each probe, and stop.")] = False,
    batch_size: BatchSizeOption = None,
    answers: AnswersOption = None,
    name: NameOption = None,
    dtype: options.DataTypeOption = "auto",
    json: options.JsonOption = None,
) -> None:
    """What a method that trusts the last queries finds hard: later questions, early ones, other words, prose."""
    from uniprefill_jax.eval.probes import Asker, parse_probes, probe_cases
    from uniprefill_jax.eval.prose import Prose

    options.check_output(json)
    options.check_output(answers, "--answers")
    names, wanted = parse_probes(tasks), options.numbers("--lengths", lengths, int)
    settings = _settings(model, config)
    console = Console(stderr=True)
    tokenizer = tokenizer_of(model)
    in_chat = tokenizer.has_chat_template if chat is None else chat
    text = Prose(tokenizer, prose)
    cases = probe_cases(Asker(tokenizer, in_chat), text, names, wanted, samples, seed)
    if show_prompt:
        _show_cases(tokenizer, cases)
        return
    llm = load_model(console, model, dtype)
    harness = f"probes, {'chat template' if in_chat else 'no chat template'}, {text.name}"
    labels = {"model": name or model, "dtype": llm.dtype, "harness": harness, "seed": seed}
    _run(console, llm, cases, settings, labels, answers, batch_size, json)


@evaluate.command()
def table(
    answers: Annotated[list[Path], typer.Argument(help="Files written by --answers, of one model.")],
    no_times: Annotated[
        bool, typer.Option("--no-times", help="Leave out times: the runs shared their device with other work.")
    ] = False,
    json: options.JsonOption = None,
) -> None:
    """Tables, and with --json a result file, of answers that are already there; needs no model and no device."""
    from uniprefill_jax.eval.rows import result_rows, without_times
    from uniprefill_jax.eval.store import read_answers
    from uniprefill_jax.eval.table import print_summary, print_tables

    options.check_output(json)
    rows: list[dict[str, Any]] = []
    devices: set[str] = set()
    for path in answers:
        common, settings, found = read_answers(path)
        labels = {name: value for name, value in common.items() if name not in ("device", "batch_size")}
        devices.add(str(common.get("device")))
        rows += result_rows(found, settings, labels)
    if no_times:
        rows = without_times(rows)
    print_tables(Console(), rows)
    print_summary(Console(), rows)
    if json is not None:
        from uniprefill_jax.result_file import write_result

        write_result(json, _command(), rows, device=", ".join(sorted(devices)))


@evaluate.command()
def fill(
    document: Annotated[Path, typer.Argument(help="A Markdown file with places for tables.")],
    folder: Annotated[
        Path | None, typer.Option(help="Where the names of result files start; the document's own folder if not given.")
    ] = None,
) -> None:
    """Write the tables of a document's places anew from the result files that each place names.

    A place is a line "<!-- table: KIND FILE ... -->" and, later, "<!-- end of table -->"; KIND is accuracy, tasks or
    probes.
    """
    from uniprefill_jax.eval.markdown import fill_tables, tables_of

    if not document.is_file():
        raise InputError(f"there is no file {document}; name a Markdown file")
    text = document.read_text(encoding="utf-8")
    found = tables_of(text)
    if not found:
        raise InputError(f"{document} has no place for a table; write the two comments of one (see --help)")
    document.write_text(fill_tables(text, folder or document.parent), encoding="utf-8")
    Console(stderr=True).print("\n".join(found), highlight=False, markup=False)


def _settings(model: str, config: list[str] | None, method: str = "") -> "list[Setting]":
    """What a user named; without anything, the default setting and the model's own where it has one."""
    from uniprefill_jax.calibrated import calibrated_setting
    from uniprefill_jax.eval.settings import parse_settings

    calibrated = calibrated_setting(model)
    extra = {} if calibrated is None else {"calibrated": calibrated.config}
    methods = method.split(",") if method else []
    named = config if config is not None else [] if methods else ["default", *extra]
    return parse_settings(named, extra, methods)


def ruler_samples(
    console: Console,
    model: str,
    data: Path | None,
    lengths: str,
    tasks: str,
    samples: int | None,
    seed: int,
    tokenizer: "Tokenizer",
    first_question: int = 0,
) -> "list[RulerSample]":
    """Samples of the `data` folder, or of prompts generated now or before.

    Raises:
        InputError: tasks, lengths or files are not as they must be.
    """
    from uniprefill_jax.eval.prepare import cache_folder, prepare
    from uniprefill_jax.eval.ruler import load_samples, parse_tasks

    names = parse_tasks(tasks)
    wanted = options.numbers("--lengths", lengths, int) if lengths else None
    if data is not None:
        return load_samples(data, names, wanted, samples)
    if wanted is None:
        raise InputError("--lengths is missing; name lengths such as 1024,4096 (or give --data)")
    count = samples or DEFAULT_SAMPLES
    folder = cache_folder(tokenizer, seed, count, first_question)
    impossible = prepare(model, folder, names, wanted, count, seed, first_question, _reporter(console))
    for length, task in impossible:
        console.print(f"left out: {task} at {length:,} tokens; RULER has no prompt that short", highlight=False)
    possible = [name for name in names if any((length, name) not in impossible for length in wanted)]
    return load_samples(folder, possible, wanted, count)


def ruler_harness(chat: bool) -> str:
    """How RULER's prompts were put, for the results."""
    return f"RULER, {'chat template' if chat else 'no chat template'}, answer prefix given"


def _reporter(console: Console):
    def report(task: str, length: int, samples: int) -> None:
        made = f"{samples} prompts" if samples else "impossible at this length"
        console.print(f"{task}, {length:,} tokens: {made}", style="dim", highlight=False)

    return report


def load_model(console: Console, model: str, dtype: options.DataType) -> "LLM":
    """The model, with the progress of reading it."""
    from uniprefill_jax.llm import LLM

    with reading(console, model) as progress:
        return LLM.load(model, dtype=options.resolve_dtype(dtype), progress=progress)


def tokenizer_of(model: str) -> "Tokenizer":
    """A model's tokenizer, without its weights."""
    from checkpoints_convert import open_checkpoint
    from uniprefill_jax.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(model))
    if tokenizer is None:
        raise InputError(f"{model} comes without a tokenizer; put its tokenizer.json beside the weights")
    return tokenizer


def _show_cases(tokenizer: "Tokenizer", cases: "Sequence[Case]") -> None:
    """The first prompt of every task and length, as tokens spell it, and what is expected."""
    from uniprefill_jax.eval.table import print_prompt

    console = Console()
    first: dict[tuple[str, int], Case] = {}
    for case in cases:
        first.setdefault((case.task, case.length), case)
    for case in first.values():
        text = tokenizer.decode(case.prompt, skip_special_tokens=False)
        if case.continuation:
            text += f"\n[then, dropping nothing]\n{tokenizer.decode(case.continuation, skip_special_tokens=False)}"
        title = f"{case.task}, {case.length:,} tokens: {len(case.prompt):,} in this prompt"
        print_prompt(console, title, f"{text}\n=> {', '.join(case.references) or 'loss'}")


def _run(
    console: Console,
    llm: "LLM",
    cases: "Sequence[Case]",
    settings: "Sequence[Setting]",
    labels: dict[str, Any],
    answers: Path | None,
    batch_size: int | None,
    json: Path | None,
) -> None:
    """Answer, show the tables, write the result file."""
    from uniprefill_jax.eval.rows import result_rows
    from uniprefill_jax.eval.runner import batch_shapes, run_cases
    from uniprefill_jax.eval.store import AnswerStore
    from uniprefill_jax.eval.table import print_phases, print_summary, print_tables, showing_progress
    from uniprefill_jax.result_file import device_name, write_result
    from uniprefill_jax.sparsify.drop_layers import resolve_drop_layers
    from uniprefill_jax.sparsify.methods.protocol import Method

    for setting in settings:
        resolve_drop_layers(Method.of(setting.config).dropping, llm.config)
    store = AnswerStore(answers, labels | {"device": device_name(), "batch_size": batch_size}, settings)
    with showing_progress(console) as report:
        progress = run_cases(llm, cases, settings, store, batch_shapes(llm, cases, batch_size), report)
    print_phases(console, progress)
    asked = {case.key for case in cases}
    found = [answer for answer in store.answers.values() if (answer.length, answer.task, answer.index) in asked]
    rows = result_rows(found, settings, labels)
    print_tables(Console(), rows)
    print_summary(Console(), rows)
    if json is not None:
        write_result(json, _command(), rows)


def _command() -> str:
    return " ".join(["uniprefill", *sys.argv[1:]])
