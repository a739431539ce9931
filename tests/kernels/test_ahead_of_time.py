"""The kernels compile for H200 and TPU v5e, v5p and v6e where there is none; see `ahead_of_time`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PLUGINS = {"gpu": ("jax_cuda13_plugin", "jax_plugins.xla_cuda13"), "tpu": ("libtpu",)}
TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")


def compiler_python(kind: str) -> str:
    """The interpreter that has the compiler for `kind`: its own environment, else this one; skips without either."""
    own = REPOSITORY / ".venv" / f"aot-{kind}" / "bin" / "python"
    if own.exists():
        return str(own)
    try:
        found = all(importlib.util.find_spec(module) for module in PLUGINS[kind])
    except ModuleNotFoundError:
        found = False
    if not found:
        pytest.skip(f"no compiler for {kind} here: make .venv/stamps/aot-{kind} installs requirements/aot-{kind}.txt")
    return sys.executable


def run(kind: str, module: str, *arguments: str) -> str:
    """Standard output of a module of the tests, run where the compiler for `kind` is."""
    command = [compiler_python(kind), "-m", f"tests.kernels.{module}", *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=dict(os.environ, JAX_PLATFORMS="cpu"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def compile_all(kind: str, target: str, *options: str) -> None:
    compiled = run(kind, "ahead_of_time", target, *options)
    for operation in ("block_score", "paged_attention", "block_sparse_attention"):
        assert compiled.count(f"compiled {operation}") >= 3


def test_kernels_compile_for_h200():
    compile_all("gpu", "sm_90a")


# The others compile every shape among the slow tests.
@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=[] if "v6e" in name else pytest.mark.slow) for name in TPUS]
)
def test_kernels_compile_for_tpu(target):
    compile_all("tpu", target)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_shape_compiles_for_h200():
    compile_all("gpu", "sm_90a", "--all")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TPUS)
def test_every_shape_compiles_for_tpu(target):
    compile_all("tpu", target, "--all")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "target"), [("gpu", "sm_90a"), *(("tpu", target) for target in TPUS)])
def test_decode_steps_hold_no_copy_of_the_pool(kind, target):
    pool, temporary = map(int, run(kind, "decode_ahead_of_time", target).split()[-2:])
    assert temporary < pool / 10
