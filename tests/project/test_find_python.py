"""requirements/find-python: takes what works, passes over what does not, and says so when there is nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIND_PYTHON = Path(__file__).resolve().parents[2] / "requirements" / "find-python"
THIS_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def find_python(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script where the only interpreters are those in `tmp_path`/bin."""
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}",
        "HOME": str(tmp_path),
        "PYENV_ROOT": str(tmp_path / "pyenv"),
    }
    return subprocess.run([FIND_PYTHON, *arguments], env=environment, capture_output=True, text=True)


def add_interpreter(path: Path, script: str) -> None:
    """Put an executable shell script where an interpreter is looked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def working() -> str:
    """A shell line that behaves as the Python that runs the tests."""
    return f'exec "{sys.executable}" "$@"'


def test_takes_the_named_version(tmp_path: Path, working: str):
    add_interpreter(tmp_path / "bin" / f"python{THIS_VERSION}", working)
    found = find_python(tmp_path, "3.99", THIS_VERSION)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).resolve() == Path(sys.executable).resolve()


def test_passes_over_a_shim_that_does_not_start(tmp_path: Path, working: str):
    add_interpreter(tmp_path / "bin" / f"python{THIS_VERSION}", "echo 'no such version' >&2; exit 127")
    add_interpreter(tmp_path / "pyenv" / "versions" / f"{THIS_VERSION}.9" / "bin" / "python", working)
    found = find_python(tmp_path, THIS_VERSION)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).resolve() == Path(sys.executable).resolve()


def test_says_what_to_do_when_there_is_none(tmp_path: Path):
    for name in ("python3.12", "python3.99", "python3", "python"):
        add_interpreter(tmp_path / "bin" / name, "exit 1")
    found = find_python(tmp_path, "3.99")
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.startswith("error: no Python 3.99") and found.stderr.count("\n") == 1


def test_a_named_interpreter_that_is_too_old_is_refused(tmp_path: Path, working: str):
    add_interpreter(tmp_path / "bin" / "mine", working)
    found = find_python(tmp_path, "--only", str(tmp_path / "bin" / "mine"), "3.99")
    assert found.returncode == 1
    assert "mine is not a Python of version 3.99" in found.stderr
