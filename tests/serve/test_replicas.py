"""Two replicas of the server behind nginx, as docs/launch.md has it, with the configuration file that it shows."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import openai
import pytest

from tests.serve.model import wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
CONFIGURATION = Path(__file__).parents[2] / "docs" / "nginx.conf"
MODEL = "smollm2-135m"
PROMPTS = [
    "One, two, three,",
    "The capital of France is",
    "A B C D E",
    "Once upon a time",
    "2 + 2 =",
    "Monday, Tuesday,",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]


class Replica(NamedTuple):
    """One server process."""

    process: subprocess.Popen[bytes]
    url: str

    def metric(self, name: str) -> float:
        """A series of /metrics, summed over its labels."""
        with urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which is told to end at the end."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def replica(log: Path) -> Iterator[Replica]:
    """A server on a port of its own, as soon as it listens."""
    options = "--max-length 256 --cache-tokens 2048 --max-running 4 --prefill-chunk 64 --port 0"
    command = [sys.executable, "-c", "from uniprefill_jax.cli import main; main()", "serve", MODEL, *options.split()]
    with log.open("wb") as written, ended(subprocess.Popen(command, stderr=written)) as process:

        def listening() -> list[str]:
            assert process.poll() is None, log.read_text()
            lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
            return [line["url"] for line in lines if line.get("message") == "listening"]

        wait_until(lambda: bool(listening()), 300)
        yield Replica(process, listening()[0])


@contextmanager
def balancer(folder: Path, replicas: list[Replica]) -> Iterator[str]:
    """nginx with the documented file, but for the ports; its address."""
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = CONFIGURATION.read_text()
    changes = {"listen 8000;": f"listen 127.0.0.1:{port};"}
    changes |= {f"127.0.0.1:{8001 + at} ": f"{one.url.removeprefix('http://')} " for at, one in enumerate(replicas)}
    for documented, own in changes.items():
        assert text.count(documented) == 1, documented
        text = text.replace(documented, own)
    (folder / "uniprefill.conf").write_text(text)
    main = f"pid {folder}/pid; daemon off; error_log stderr; events {{}} http {{ access_log off; include {folder}/"
    (folder / "nginx.conf").write_text(f"{main}uniprefill.conf; }}\n")
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with (folder / "nginx.log").open("wb") as log, ended(subprocess.Popen(command, stderr=log)) as process:

        def answers() -> bool:
            assert process.poll() is None, (folder / "nginx.log").read_text()
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        wait_until(answers)
        yield f"http://127.0.0.1:{port}"


def ask(url: str, prompt: str, stream: bool = False) -> str:
    """A greedy continuation, whole or streamed; whatever goes wrong is raised."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as api:
        answer = api.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stream=stream)
        return "".join(chunk.choices[0].text for chunk in (answer if stream else [answer]))


def all_at_once(url: str, rounds: int, **asked: bool) -> list[str]:
    """Every prompt so many times, concurrently."""
    with ThreadPoolExecutor(rounds * len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt, **asked), PROMPTS * rounds))


def test_two_replicas_behind_nginx_and_one_that_dies(tmp_path: Path) -> None:
    with ExitStack() as stack:
        replicas = [stack.enter_context(replica(tmp_path / f"replica_{number}.log")) for number in range(2)]
        url = stack.enter_context(balancer(tmp_path, replicas))
        first, second = replicas

        alone = [ask(first.url, prompt) for prompt in PROMPTS]
        assert len(set(alone)) == len(PROMPTS)
        assert [ask(second.url, prompt) for prompt in PROMPTS] == alone
        before = [one.metric("vllm:request_success_total") for one in replicas]
        assert all_at_once(url, 2) == alone * 2
        assert all_at_once(url, 1, stream=True) == alone
        served = [one.metric("vllm:request_success_total") - was for one, was in zip(replicas, before, strict=True)]
        print(f"served by each: {served}")
        assert sum(served) == 3 * len(PROMPTS) and min(served) >= len(PROMPTS)

        # One dies with requests in hand: the other one answers them all.
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(all_at_once, url, 2)
            wait_until(lambda: first.metric("vllm:num_requests_running") >= 2)
            first.process.send_signal(signal.SIGKILL)
            assert first.process.wait(30) == -signal.SIGKILL
            assert answers.result() == alone * 2
        assert all_at_once(url, 1) == alone
        assert all_at_once(url, 1, stream=True) == alone
        with urlopen(f"{url}/health", timeout=30) as health:
            assert health.status == 200
