"""A server under load for many minutes on this machine: Poisson arrivals, random cancellations, then the books.

    python -m benchmarks.serve_soak --minutes 15 [--rate 0.5] [--json PATH]

SmolLM2-135M behind the HTTP server, asked by OpenAI's client: prompts of 20 to 1,500 tokens (log-uniform) of a text,
completions and chats, streamed or not, with dropping on or off, of which a fifth go away before the end. Afterwards no
page, slot or device array may be held, the process must not have grown, no request may have failed, and the server's
metrics must agree with what the client has counted. Exit code 1 where anything of this is not so.
"""

import argparse
import asyncio
import gc
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import jax
import numpy as np
import openai
import psutil

from uniprefill_jax import LLM, Engine, EngineConfig
from uniprefill_jax.demo.document import build_prompt
from uniprefill_jax.engine.warm_up import warm_up
from uniprefill_jax.result_file import write_result
from uniprefill_jax.serve.server import RunningServer, running_server
from uniprefill_jax.serve.settings import ServerSettings

MODEL = "smollm2-135m"
SHORTEST, LONGEST = 20, 1500
MEMORY_GROWTH = 1.05


@dataclass
class Counts:
    """What the client saw."""

    finished: int = 0
    cancelled: int = 0
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cancelled_completion_tokens: int = 0  # most that the cancelled ones could have got
    cancelled_prompt_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)


def main() -> None:
    """Run the load, check the books, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--cancel", type=float, default=0.2, help="share of requests that go away")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM.load(MODEL, dtype="float32")
    assert llm.tokenizer is not None
    text = build_prompt(llm.tokenizer, 0.5).token_ids
    engine = Engine(llm, EngineConfig(pool_pages=30 * 8192 // 64, max_running=8, prefill_chunk=512, max_length=2048))
    settings = ServerSettings(MODEL, port=0, request_timeout=300)
    print("compiling", flush=True)
    warm_up(engine, settings.uniprefill, LONGEST + 100)
    with running_server(engine, settings) as server:
        row = asyncio.run(_soak(server, text, options))
    for name, value in row.items():
        print(f"{name}: {value}")
    if options.json is not None:
        write_result(options.json, "serve_soak", [row])
    sys.exit(0 if row["passed"] else 1)


async def _soak(server: RunningServer, text: list[int], options: argparse.Namespace) -> dict[str, Any]:
    random = np.random.default_rng(options.seed)
    counts, tasks, memory = Counts(), set(), []
    process = psutil.Process()
    arrays = _idle_arrays()
    start = time.monotonic()
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as api:
        next_memory, next_report = 0.0, 30.0
        while (passed := time.monotonic() - start) < 60 * options.minutes:
            if passed >= next_memory:
                memory.append(process.memory_info().rss)
                next_memory += 5.0
            if passed >= next_report:
                print(
                    f"{passed:.0f} s: {counts.finished} finished, {counts.cancelled} cancelled, "
                    f"{len(counts.errors)} errors, {len(tasks)} open, {memory[-1] / 2**20:.0f} MiB",
                    flush=True,
                )
                next_report += 30.0
            task = asyncio.create_task(_request(api, text, random, counts, options.cancel))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(random.exponential(1 / options.rate))
        sent_seconds = time.monotonic() - start
        await asyncio.gather(*tasks)
    deadline = time.monotonic() + 60
    while _held(server) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    memory.append(process.memory_info().rss)
    metrics = dict(_read_metrics(server.url))
    checks = _checks(counts, metrics) | {
        "nothing_held": not _held(server),
        "device_arrays_as_before": _idle_arrays() == arrays,
        # The first third is left to caches that fill: the allocator's, the tokenizer's, the client's.
        "memory_does_not_grow": memory[-1] <= MEMORY_GROWTH * max(memory[: 1 + len(memory) // 3]),
        "no_errors": not counts.errors,
    }
    return {
        "arch": MODEL,
        "minutes": round(sent_seconds / 60, 2),
        "rate": options.rate,
        "finished": counts.finished,
        "cancelled": counts.cancelled,
        "errors": counts.errors[:5],
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "ttft_ms_p50": _percentile(counts.first_token_seconds, 50),
        "ttft_ms_p99": _percentile(counts.first_token_seconds, 99),
        "whole_ms_p50": _percentile(counts.whole_seconds, 50),
        "whole_ms_p99": _percentile(counts.whole_seconds, 99),
        "preemptions": metrics["vllm:num_preemptions_total"],
        "kept_fraction_mean": round(
            metrics["uniprefill:kept_fraction_sum"] / metrics["uniprefill:kept_fraction_count"], 4
        ),
        "memory_mib_start": memory[0] >> 20,
        "memory_mib_after_a_third": max(memory[: 1 + len(memory) // 3]) >> 20,
        "memory_mib_end": memory[-1] >> 20,
        "checks": checks,
        "passed": all(checks.values()),
    }


async def _request(
    api: openai.AsyncOpenAI, text: list[int], random: np.random.Generator, counts: Counts, cancel: float
) -> None:
    """One request, which may go away before its end."""
    length = round(math.exp(random.uniform(math.log(SHORTEST), math.log(LONGEST))))
    first = int(random.integers(0, len(text) - length)) if length < len(text) else 0
    limit = int(random.integers(1, 48))
    leaves = random.random() < cancel
    patience = float(random.exponential(1.5))
    body: dict[str, Any] = {"uniprefill": {"enabled": bool(random.random() < 0.8), "top_p": 0.9}}
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": limit,
        "seed": int(random.integers(2**31)),
        "temperature": float(random.choice([0.0, 0.8])),
        "extra_body": body,
    }
    if random.random() < 0.3:
        message = {"role": "user", "content": "What is truth? " * int(random.integers(1, 40))}
        work = _ask(api.chat.completions.create, asked | {"messages": [message]}, random.random() < 0.7)
        length = 800  # at most, with the template
    else:
        work = _ask(api.completions.create, asked | {"prompt": text[first : first + length]}, random.random() < 0.7)
    start = time.monotonic()
    try:
        prompt_tokens, completion_tokens, waited = await asyncio.wait_for(work, patience if leaves else None)
    except TimeoutError:
        counts.cancelled += 1
        counts.cancelled_prompt_tokens += length
        counts.cancelled_completion_tokens += limit
    except openai.OpenAIError as error:
        counts.errors.append(repr(error))
    else:
        counts.finished += 1
        counts.prompt_tokens += prompt_tokens
        counts.completion_tokens += completion_tokens
        counts.whole_seconds.append(time.monotonic() - start)
        if waited is not None:
            counts.first_token_seconds.append(waited)


async def _ask(create: Any, asked: dict[str, Any], streams: bool) -> tuple[int, int, float | None]:
    """Tokens of the prompt and of the answer, and the seconds to the first chunk where it is streamed."""
    if not streams:
        usage = (await create(**asked)).usage
        return usage.prompt_tokens, usage.completion_tokens, None
    start, waited, usage = time.monotonic(), None, None
    async with await create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        async for chunk in stream:
            waited = waited or time.monotonic() - start
            usage = chunk.usage or usage
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens, waited


def _checks(counts: Counts, metrics: dict[str, float]) -> dict[str, bool]:
    """Whether the server's books agree with the client's. One that goes away may have been finished just before."""
    ended = {
        reason: sum(v for k, v in metrics.items() if k.startswith("vllm:request_success_total") and reason in k)
        for reason in ('"stop"', '"length"', '"abort"')
    }
    finished = ended['"stop"'] + ended['"length"']
    surplus = finished - counts.finished
    prompt = metrics["vllm:request_prompt_tokens_sum"] - counts.prompt_tokens
    generated = metrics["vllm:request_generation_tokens_sum"] - counts.completion_tokens
    return {
        # One that went away before it was submitted is known to nobody but the client.
        "finished_agree": 0 <= surplus <= counts.cancelled,
        "cancelled_agree": ended['"abort"'] + surplus <= counts.cancelled,
        "prompt_tokens_agree": 0 <= prompt <= counts.cancelled_prompt_tokens and (surplus > 0 or prompt == 0),
        "generated_tokens_agree": 0 <= generated <= counts.cancelled_completion_tokens
        and (surplus > 0 or generated == 0),
        "latencies_counted": metrics["vllm:e2e_request_latency_seconds_count"] == finished
        and metrics["vllm:time_to_first_token_seconds_count"] >= finished
        and metrics["uniprefill:kept_fraction_count"] == finished,
        "gauges_at_zero": metrics["vllm:num_requests_running"]
        == metrics["vllm:num_requests_waiting"]
        == metrics["vllm:kv_cache_usage_perc"]
        == 0,
    }


def _read_metrics(url: str) -> Iterator[tuple[str, float]]:
    """All series; those with no label but the model's by their bare name."""
    with urlopen(f"{url}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, _, labels = series.partition("{")
                yield (name if labels.startswith("model_name=") and "," not in labels else series), float(value)


def _held(server: RunningServer) -> bool:
    stats = server.engine.stats
    return (stats.pages_in_use, stats.pages_reserved, stats.slots_in_use, server.engine.waiting) != (0, 0, 0, 0)


def _idle_arrays() -> int:
    gc.collect()
    return len(jax.live_arrays())


def _percentile(seconds: list[float], share: int) -> float | None:
    return round(1e3 * float(np.percentile(seconds, share)), 1) if seconds else None


if __name__ == "__main__":
    main()
