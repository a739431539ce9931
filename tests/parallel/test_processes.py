"""Processes that do not come, or die, end the others with a clear line and no hang; wrong options are named."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel.models import write_checkpoint
from tests.parallel.test_meshes import REPOSITORY, environment, free_address
from uniprefill_jax.cli import main
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.parallel.processes import joined_processes

PROMPT = ("--prompt", "x", "--distributed")


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment(1), **streams)


def ended(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What each wrote to standard error; fails where one of them outlives the time."""
    deadline = time.monotonic() + seconds
    try:
        return [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("generate", "m", "--prompt", "x", "--process-id", "0"), "add --distributed"),
        (("generate", "m", *PROMPT, "--process-id", "0"), "--coordinator-address and --num-processes missing"),
        (
            ("generate", "m", *PROMPT, "--process-id=2", "--num-processes=2", "--coordinator-address=a:1"),
            "--process-id is 2",
        ),
        (
            ("generate", "m", *PROMPT, "--process-id=0", "--num-processes=2", "--coordinator-address=somewhere"),
            "use host:port",
        ),
        (("generate", "m", *PROMPT), "could not join a run"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, words: str, capsys, monkeypatch) -> None:
    # A test run may itself be a job of a cluster.
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as exit_information:
        main(list(options))
    error = capsys.readouterr().err
    assert exit_information.value.code == 2 and error.count("\n") == 1 and words in error


def test_half_of_the_options_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--process-id missing"), joined_processes("localhost:1", 2):
        pass


def test_a_process_that_never_comes_is_not_waited_for_long() -> None:
    (error,) = ended([start("tests.parallel.one_process", free_address(), "0", "1", "exchange")], 60)
    assert "error: process 0 of 2" in error and "has waited 1 s for the others" in error
    assert "stack trace" not in error


def test_a_process_that_dies_ends_the_other_at_its_next_exchange() -> None:
    address = free_address()
    pair = [start("tests.parallel.one_process", address, str(number), "60", "exchange") for number in range(2)]
    error, _ = ended(pair, 120)
    assert pair[1].returncode == 7 and pair[0].returncode == 2
    assert error.splitlines()[-1].startswith("error: process 0 of 2 failed")


@pytest.mark.slow
def test_a_process_that_dies_ends_one_that_exchanges_nothing() -> None:
    address = free_address()
    pair = [start("tests.parallel.one_process", address, str(number), "60", "wait") for number in range(2)]
    assert pair[1].wait(120) == 7
    since = time.monotonic()
    error, _ = ended(pair, 60)
    print(f"ended {time.monotonic() - since:.0f} s later")
    assert pair[0].returncode not in (0, None)
    assert "another task died" in error


@pytest.mark.slow
def test_a_shard_file_that_one_process_lacks_ends_both(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(number), "llama") for number in range(2)]
    lacking = sorted(folders[1].glob("*.safetensors"))[0]
    lacking.unlink()
    address = free_address()
    pair = [start("tests.parallel.two_processes", address, str(n), "llama", str(folders[n])) for n in range(2)]
    assert pair[1].wait(120) != 0
    since = time.monotonic()
    _, error = ended(pair, 60)
    print(f"ended {time.monotonic() - since:.0f} s later")
    assert pair[0].returncode != 0
    assert "1 of 3 shards" in error and lacking.name in error
