"""`serve` and `bench throughput` on two processes: process 0 answers as one process would, and both end together."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest

import uniprefill_jax as up
from tests.parallel.comparison import prompts_of
from tests.parallel.models import write_checkpoint
from tests.parallel.test_meshes import REPOSITORY, environment, free_address
from tests.serve.model import wait_until

pytestmark = pytest.mark.slow
PROGRAM = "from uniprefill_jax.cli import main; main()"
DROPPING = "--top-p 0.05 --block-size 16 --drop-layers 0,1"
SERVE = f"--port 0 --name tiny --max-length 512 --cache-tokens 1024 --max-running 2 --prefill-chunk 64 {DROPPING}"
CONFIG = up.UniPrefillConfig(top_p=0.05, block_size=16, drop_layers=(0, 1))
PROMPTS = prompts_of((480, 60))


class Pair:
    """One command as two processes; what each of them writes goes to files in a folder."""

    def __init__(self, folder: Path, *words: str):
        self._folder = folder
        address = free_address()
        self.processes: list[subprocess.Popen[bytes]] = []
        for number in range(2):
            where = ["--distributed", f"--coordinator-address={address}", "--num-processes=2", f"--process-id={number}"]
            with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as err:
                command = [sys.executable, "-W", "error", "-c", PROGRAM, *words, *where]
                self.processes.append(
                    subprocess.Popen(command, cwd=REPOSITORY, env=environment(1), stdout=out, stderr=err)
                )

    def written(self, number: int, stream: str = "err") -> str:
        return (self._folder / f"{number}.{stream}").read_text()

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written(0).splitlines() if line.startswith("{")]

    def url(self) -> str:
        """Where process 0 listens, as soon as it does."""
        urls: list[str] = []

        def listening() -> bool:
            assert [process.poll() for process in self.processes] == [None, None], self.written(0) + self.written(1)
            urls.extend(line["url"] for line in self.logged() if line["message"] == "listening")
            return bool(urls)

        wait_until(listening, 300)
        return urls[0]

    def ended(self, seconds: float) -> list[int]:
        """How both ended."""
        deadline = time.monotonic() + seconds
        return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]


@contextmanager
def pair(folder: Path, *words: str) -> Iterator[Pair]:
    """Both processes, which do not outlive the block."""
    folder.mkdir(exist_ok=True)
    both = Pair(folder, *words)
    try:
        yield both
    finally:
        for process in both.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


def metric(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def asked(prompts: Any, tokens: int) -> dict[str, Any]:
    """A request whose answer names its tokens; the model has no tokenizer."""
    options = {"extra_body": {"ignore_eos": True}, "temperature": 0, "logprobs": 0}
    return {"model": "tiny", "prompt": prompts, "max_tokens": tokens} | options


def test_serve(model: Path, tmp_path: Path) -> None:
    sampling = up.SamplingConfig(max_tokens=6, ignore_eos=True)
    alone = up.LLM.load(model, "float32").generate(PROMPTS, CONFIG, sampling)
    wanted = [[str(token) for token in completion.token_ids] for completion in alone]
    assert alone[0].prefill.segment_lengths[-1] < 480, "nothing is dropped"
    with pair(tmp_path / "serve", "serve", str(model), *SERVE.split()) as both:
        url = both.url()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as api:
            together = api.completions.create(**asked(PROMPTS, 6))
            assert [choice.logprobs.tokens for choice in together.choices] == wanted

            # What is refused is refused by process 0 alone, and nobody is left behind by it.
            with pytest.raises(openai.BadRequestError):
                api.completions.create(**asked([1] * 600, 6))
            broken_off = api.completions.create(**asked(PROMPTS[1], 400), stream=True)
            next(iter(broken_off))
            broken_off.close()
            wait_until(lambda: metric(url, "uniprefill:slots_in_use") == 0)
            assert metric(url, 'vllm:request_success_total{finished_reason="abort"') == 1

            # A cluster tells all processes at once to end; what runs is finished.
            stream = iter(api.completions.create(**asked(PROMPTS[0], 6), stream=True))
            chunks = [next(stream)]
            for process in reversed(both.processes):
                process.send_signal(signal.SIGTERM)
            chunks += stream
            reports = [chunk.choices[0].logprobs for chunk in chunks]
            assert [token for report in reports if report is not None for token in report.tokens] == wanted[0]
        assert both.ended(60) == [0, 0], both.written(0) + both.written(1)
    assert [line["status"] for line in both.logged() if line.get("path") == "/v1/completions"] == [200, 400, 499, 200]
    assert both.written(1) == ""


@pytest.mark.parametrize("dead", [0, 1])
def test_one_that_dies_ends_the_other_though_nothing_is_asked(model: Path, tmp_path: Path, dead: int) -> None:
    with pair(tmp_path / "serve", "serve", str(model), *SERVE.split()) as both:
        both.url()
        both.processes[dead].kill()
        since = time.monotonic()
        codes = both.ended(60)
        print(f"process {1 - dead} ended {time.monotonic() - since:.0f} s later: {both.written(1 - dead)[-500:]}")
        assert codes[1 - dead] not in (0, None)


def test_one_that_dies_ends_the_other_in_a_step(model: Path, tmp_path: Path) -> None:
    with pair(tmp_path / "serve", "serve", str(model), *SERVE.split()) as both:
        url = both.url()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as api:
            stream = iter(api.completions.create(**asked(PROMPTS[1], 400), stream=True))
            next(stream)
            both.processes[1].kill()
            since = time.monotonic()
            # The engine's failure is the last event, unless the process ends before: then the connection breaks.
            with suppress(Exception):
                for _ in stream:
                    pass
        assert both.ended(60)[0] not in (0, None)
        print(f"ended {time.monotonic() - since:.0f} s later: {both.written(0)[-500:]}")


def test_bench_throughput(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    words = f"bench throughput --model {model} --lengths 200 --batches 2 --output-len 3 --top-p 0.5 --drop-layers 0,1"
    words += " --prefill-chunk 64 --max-running 2 --pool-gib 0.01 --request-rate 20 --dtype float32"
    with pair(tmp_path / "bench", *words.split(), "--json", str(path)) as both:
        assert both.ended(300) == [0, 0], both.written(0) + both.written(1)
        printed = [json.loads(line) for line in both.written(0, "out").splitlines() if line.startswith("{")]
    rows = json.loads(path.read_text())["rows"]
    assert printed == rows and [row["method"] for row in rows] == ["dense", "top_p=0.5"]
    assert "{" not in both.written(1, "out")
    for row in rows:
        assert row["tp"] == 2 and row["dtype"] == "float32" and row["tokens_per_s"] > 0
