"""Fixtures shared by the tests: the oracle (transformers in its own interpreter) and the models both sides load."""

import json
import os
import subprocess
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings

# Threads of XLA's CPU client, which reads it when it starts. Interpreted kernels hold one for every warpgroup waiting
# at a barrier, while what it waits for needs one to run on: with the two of a machine of two cores they can lock up.
os.environ.setdefault("NPROC", "8")

# The same examples every time: a test that fails here fails everywhere.
settings.register_profile("reproducible", derandomize=True, database=None, deadline=None)
settings.load_profile("reproducible")

REPOSITORY = Path(__file__).parents[1]
ORACLE_PYTHON = REPOSITORY / ".venv" / "oracle" / "bin" / "python"
PUBLISHED_CONFIGS = Path(__file__).parent / "data" / "published_configs.json"

# Lengths 0, 1 and 63 mod 64, beyond Gemma's window of 512. Neither model's RoPE has a knee.
REAL_LENGTHS = {"smollm2-135m": (640, 1025, 2623), "gemma-3-270m": (640, 705, 1087)}
DONE = "done"
ORACLE_FIXTURES = ("oracle_small", "oracle_rotary", "oracle_real")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--oracle-python: the interpreter that has torch and transformers."""
    parser.addoption("--oracle-python", default=str(ORACLE_PYTHON), help="interpreter with torch and transformers")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what the selected tests need, so that one oracle process computes it all; keep folders in one process."""
    names = {name for item in items for name in getattr(item, "fixturenames", ())}
    config.stash[_NEEDED] = {name for name in ORACLE_FIXTURES if name in names}
    if config.pluginmanager.hasplugin("xdist"):
        # Tests of one folder share models and compiled programs, and interpreted kernels leave no core to each other.
        for item in items:
            item.add_marker(pytest.mark.xdist_group(item.path.parent.name))


_NEEDED = pytest.StashKey[set[str]]()


@pytest.fixture(scope="session")
def oracle_output(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with everything the oracle computed for the selected tests."""
    python = Path(pytestconfig.getoption("--oracle-python"))
    if not python.exists():
        pytest.fail(
            f"the parity oracle {python} is missing: `make test` makes it; --oracle-python names another", pytrace=False
        )
    needed = pytestconfig.stash[_NEEDED]
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which the processes of a run share
    output = folder / "oracle"
    with FileLock(folder / "oracle.lock"):
        if not (output / DONE).exists():
            _run_oracle(python, output, needed)
    return output


def _run_oracle(python: Path, output: Path, needed: set[str]) -> None:
    output.mkdir()
    jobs: dict[str, object] = {"output": str(output)}
    if "oracle_small" in needed:
        from tests.oracle.small_models import SMALL_MODELS

        jobs["small"] = list(SMALL_MODELS)
    if "oracle_rotary" in needed:
        jobs["rotary"] = json.loads(PUBLISHED_CONFIGS.read_text())
    if "oracle_real" in needed:
        jobs["real"] = {name: _real_job(name) for name in REAL_LENGTHS}
    (output / "jobs.json").write_text(json.dumps(jobs))
    command = [str(python), str(REPOSITORY / "tests" / "oracle" / "run.py"), str(output / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"the oracle failed ({' '.join(command)}):\n{done.stderr[-4000:]}", pytrace=False)
    print("\n" + "\n".join(line for line in done.stderr.splitlines() if line.startswith("oracle:")))
    (output / DONE).touch()


def _real_job(name: str) -> dict[str, object]:
    from checkpoints_convert import open_checkpoint
    from uniprefill_jax.tokenizer import load_tokenizer

    path = packaged(name)
    tokenizer = load_tokenizer(open_checkpoint(path))
    assert tokenizer is not None
    longest = max(REAL_LENGTHS[name])
    ids = tokenizer.encode(real_text())[:longest]
    assert len(ids) == longest, f"the text has {len(ids)} tokens, {longest} are needed"
    return {"gguf": str(path), "ids": ids, "lengths": list(REAL_LENGTHS[name])}


def packaged(name: str) -> Path:
    """The GGUF file of a packaged model; the test fails where it is not installed."""
    from checkpoints_convert import find_packaged

    path = find_packaged(name)
    if path is None:
        pytest.fail(f"the packaged model {name} is not installed: `make test` installs it", pytrace=False)
    return path


def real_text() -> str:
    """A long public-domain text: the demo's document."""
    document = next(file for file in resources.files("uniprefill_jax.demo").iterdir() if file.name.endswith(".txt"))
    return document.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def oracle_small(oracle_output: Path) -> Callable[[str], dict[str, np.ndarray]]:
    """The oracle's arrays for a small model, by name."""
    return lambda name: dict(np.load(oracle_output / f"{name}.npz"))


@pytest.fixture(scope="session")
def oracle_rotary(oracle_output: Path) -> dict[str, np.ndarray]:
    """The oracle's rotary tables."""
    return dict(np.load(oracle_output / "rotary.npz"))


@pytest.fixture(scope="session")
def oracle_real(oracle_output: Path) -> Callable[[str], dict[str, np.ndarray]]:
    """The oracle's arrays for a packaged model, by name."""
    return lambda name: dict(np.load(oracle_output / f"{name}.npz"))


@pytest.fixture(scope="session")
def small_folder(oracle_small, oracle_output: Path) -> Callable[[str], Path]:
    """The safetensors folder of a small random model, by name."""
    return lambda name: oracle_output / name


@pytest.fixture(scope="session")
def small_llm(small_folder):
    """A small random model in the library, float32 unless said otherwise; loaded once."""
    import uniprefill_jax as up

    return lru_cache(lambda name, dtype="float32": up.LLM.load(small_folder(name), dtype=dtype))


@pytest.fixture(scope="session")
def plain_model(small_folder):
    """A small random model in plain numpy; loaded once."""
    from tests.parity.plain_model import PlainModel

    return lru_cache(lambda name: PlainModel(small_folder(name)))


@pytest.fixture(scope="session")
def real_llm():
    """A packaged model in the library; loaded once."""
    import uniprefill_jax as up

    return lru_cache(lambda name, dtype="float32": up.LLM.load(packaged(name), dtype=dtype))
