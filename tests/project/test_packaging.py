"""The project's own promises: what is tracked, what is locked, and how fast the package is imported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Spelled in pieces, so that this file does not hold what it looks for.
REGISTRIES = ("pypi" + r"\.org", "python" + "hosted", "npm" + "js")
FORBIDDEN = re.compile(r"(^|[^A-Za-z0-9_.])/(work|root|home)/|" + "|".join(REGISTRIES))
ADDED_IMPORT_SECONDS = 2.0


def tracked_files() -> list[Path]:
    """Every file under version control, or, in an unpacked source archive, every file that would be."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [path for folder in PROJECT_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]


PROJECT_FOLDERS = ("uniprefill_jax", "pallas_kernels", "checkpoints_convert", "tests", "requirements")


def locked_versions(name: str) -> dict[str, Version]:
    """Pinned versions of a lock file by normalised name."""
    text = (ROOT / "requirements" / name).read_text()
    return {
        canonicalize_name(match[1]): Version(match[2])
        for match in re.finditer(r"^([A-Za-z0-9][\w.-]*)==([^\s\\;]+)", text, re.MULTILINE)
    }


def test_tracked_files_name_no_machine_path_or_registry():
    hits = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        hits += [f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if FORBIDDEN.search(line)]
    assert hits == []


def test_tracked_files_are_small():
    weights = "model.safetensors"  # of the small model that training/ makes
    limits = {path: 8 * 2**20 if path.name == weights else 5_000_000 for path in tracked_files()}
    assert [str(path) for path, limit in limits.items() if path.stat().st_size > limit] == []
    assert sum(path.stat().st_size for path in tracked_files()) < 20_000_000


@pytest.mark.parametrize(
    ("lock", "requirements"),
    [
        ("lock.txt", PROJECT["dependencies"]),
        (
            "lock-dev.txt",
            PROJECT["dependencies"]
            + PROJECT["optional-dependencies"]["dev"]
            + PROJECT["optional-dependencies"]["eval"]
            + PROJECT["optional-dependencies"]["serve"],
        ),
    ],
)
def test_lock_is_in_step_with_pyproject(lock: str, requirements: list[str]):
    versions = locked_versions(lock)
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{lock} lacks {name}: run `make lock`"
        assert versions[name] in requirement.specifier, f"{lock} has {name} {versions[name]}: run `make lock`"


def test_locks_agree_and_every_file_is_hashed():
    runtime, development = locked_versions("lock.txt"), locked_versions("lock-dev.txt")
    assert runtime.items() <= development.items()
    for name in ("lock.txt", "lock-dev.txt", "weights-smollm2-135m.txt", "weights-gemma-3-270m.txt", "ruler.txt"):
        text = (ROOT / "requirements" / name).read_text()
        entries = re.split(r"^(?=[A-Za-z0-9])", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
        assert [entry.split()[0] for entry in entries if entry.strip() and "--hash=sha256:" not in entry] == []


def test_lock_holds_the_tested_versions_that_the_reference_also_uses():
    versions = locked_versions("lock.txt")
    oracle = locked_versions("oracle.txt")
    assert versions["jax"] == versions["jaxlib"] == Version("0.11.2")
    for shared in ("transformers", "gguf", "safetensors"):
        assert oracle[shared] == versions[shared], f"requirements/oracle.txt and lock.txt differ in {shared}"


def test_extras_and_script_are_declared():
    assert set(PROJECT["optional-dependencies"]) == {"cuda13", "tpu", "demo", "eval", "plots", "serve", "dev"}
    assert PROJECT["scripts"] == {"uniprefill": "uniprefill_jax.cli:main"}
    assert PROJECT["requires-python"] == ">=3.12"


def test_the_base_install_needs_nothing_of_the_server():
    """All but `uniprefill serve` works without the extra, and that says in one line what is missing."""
    program = (
        "import sys\n"
        "for name in ('starlette', 'uvicorn', 'prometheus_client'): sys.modules[name] = None\n"
        "import uniprefill_jax.cli.app as app; from uniprefill_jax import Engine\n"
        "app.main(['serve', 'smollm2-135m'])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: the server needs") and "uniprefill-jax[serve]" in result.stderr


def test_importing_the_package_adds_little_to_importing_jax():
    program = (
        "import sys, time; import jax, jax.numpy; start = time.perf_counter(); import uniprefill_jax;"
        "print(time.perf_counter() - start); print('transformers' in sys.modules)"
    )
    best = 1e9
    for _ in range(3):  # the first run may have to compile the modules, and the machine may be busy
        result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        seconds, has_transformers = result.stdout.split()
        best = min(best, float(seconds))
        assert has_transformers == "False"
        if best <= ADDED_IMPORT_SECONDS:
            return
    assert best <= ADDED_IMPORT_SECONDS
