"""What the server counts, in the format of Prometheus.

Serving dashboards are written for vLLM's names, so whatever means the same here is called the same: `vllm:...`, with
the label `model_name` and vLLM's buckets, and an existing dashboard works unchanged. What only this library has, the
kept fraction above all, is called `uniprefill:...`. A sequence is counted where the engine sees it: a request with
n = 2 is two.
"""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.registry import Collector

from uniprefill_jax.engine.requests import Event
from uniprefill_jax.serve.engine_thread import EngineThread, Job

__all__ = ["CONTENT_TYPE", "Metrics"]

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_FRACTION_BUCKETS = tuple(step / 20 for step in range(1, 21))


class _PrefixCounters(Collector):
    """Prompt tokens looked up for reuse and found, as the engine has counted them."""

    def __init__(self, engine: EngineThread, labels: dict[str, str]):
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Both counters as of the engine's last step."""
        stats = self._engine.stats
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up for reuse.", stats.prefix_queried_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens that were found and not computed.", stats.prefix_hit_tokens),
        ):
            family = CounterMetricFamily(name, text, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), value)
            yield family


class Metrics:
    """The counters of one server, in a registry of its own. It is the engine thread's observer."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._between_tokens = self._histogram(
            "vllm:inter_token_latency_seconds", "From one token to the next.", _TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Of a finished sequence, the mean time from one token to the next.",
            _TOKEN_BUCKETS,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self._prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of finished sequences.", _LENGTH_BUCKETS
        )
        self._generated_length = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for finished sequences.", _LENGTH_BUCKETS
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens read.")
        self._generated_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._preemptions = self._counter("vllm:num_preemptions", "Sequences that lost their pages and were redone.")
        self._ended = Counter(
            "vllm:request_success",
            "Sequences that have ended, by reason; abort: cancelled.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._kept = self._histogram(
            "uniprefill:kept_fraction",
            "Of a finished sequence, prompt tokens in the attention caches over those of a dense prefill.",
            _FRACTION_BUCKETS,
        )
        self._dense = self._counter("uniprefill:dense_prefills", "Finished sequences whose prefill dropped nothing.")
        self._answers = Counter(
            "uniprefill:http_responses",
            "Answers by path and status; 499: the client went away first.",
            ("path", "status"),
            registry=self.registry,
        )

    def watch(self, engine: EngineThread) -> None:
        """Show where the engine stands, as of its last step, whenever somebody asks."""
        gauges = {
            "vllm:num_requests_running": (
                "Sequences that are being read or generated.",
                lambda: engine.stats.prefilling + engine.stats.running,
            ),
            "vllm:num_requests_waiting": ("Sequences that hold nothing yet.", lambda: engine.waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of the pages in use; 1 is all.",
                lambda: engine.stats.pages_in_use / engine.stats.pages,
            ),
            "uniprefill:pages": ("Pages of the pool.", lambda: engine.stats.pages),
            "uniprefill:pages_in_use": ("Pages in use.", lambda: engine.stats.pages_in_use),
            "uniprefill:pages_reserved": (
                "Free pages promised to prefills in progress.",
                lambda: engine.stats.pages_reserved,
            ),
            "uniprefill:pages_cached": (
                "Pages kept for prefix reuse alone; free for whoever needs them.",
                lambda: engine.stats.pages_cached,
            ),
            "uniprefill:slots_in_use": ("Admitted sequences.", lambda: engine.stats.slots_in_use),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, tuple(self._labels), registry=self.registry).labels(**self._labels).set_function(read)
        self.registry.register(_PrefixCounters(engine, self._labels))

    def exposition(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def answered(self, path: str, status: int) -> None:
        """An HTTP request was answered."""
        self._answers.labels(path=path, status=str(status)).inc()

    def token(self, job: Job, seconds: float) -> None:
        """A sequence got a token."""
        self._generated_tokens.inc()
        if job.generated == 1:
            self._prompt_tokens.inc(len(job.spec.prompt))
            self._first_token.observe(seconds)
        else:
            self._between_tokens.observe(seconds)

    def finished(self, job: Job, event: Event) -> None:
        """A sequence ended by itself."""
        now = time.monotonic()
        self._ended.labels(finished_reason=event.finish_reason, **self._labels).inc()
        self._whole.observe(now - job.arrived)
        self._prompt_length.observe(len(job.spec.prompt))
        self._generated_length.observe(job.generated)
        if job.generated > 1:
            self._per_token.observe((job.last_token_at - job.first_token_at) / (job.generated - 1))
        self._kept.observe(event.kept_fraction)
        if job.spec.config.is_dense:
            self._dense.inc()

    def cancelled(self, job: Job) -> None:
        """A sequence was cancelled."""
        self._ended.labels(finished_reason="abort", **self._labels).inc()

    def preempted(self, job: Job) -> None:
        """A sequence will be computed again."""
        self._preemptions.inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, tuple(self._labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, tuple(self._labels), registry=self.registry).labels(**self._labels)
