"""Prometheus metrics of one server, in a registry of its own so that several servers share a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit.serve.http.request_ids import current

if TYPE_CHECKING:
    from toolkit.serve.watch.traces import Traces

PREFIX = "toolkit:"
_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_WAITS = (0.1, 0.3, 1, 3, 10, 30, 100)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_E2E = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_GAUGE, _COUNT = GaugeMetricFamily, CounterMetricFamily
# name in the engine's stats -> (kind, metric, help)
FROM_ENGINE = {
    "running": (_GAUGE, "num_requests_running", "Requests in the running batch"),
    "waiting": (_GAUGE, "num_requests_waiting", "Requests that wait to be scheduled"),
    "kv_usage": (_GAUGE, "kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1"),
    "kv_planned_bytes": (_GAUGE, "kv_cache_planned_bytes", "What the KV cache may take"),
    "kv_resident_bytes": (_GAUGE, "kv_cache_resident_bytes", "What of it is in memory: it grows with use"),
    "preemptions": (_COUNT, "preemptions", "Requests put back for lack of KV cache blocks"),
    "prefix_hit_tokens": (_COUNT, "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache"),
    "prefix_queried_tokens": (_COUNT, "prefix_cache_queried_tokens", "Prompt tokens looked up in it"),
    "kept_hit_tokens": (_COUNT, "external_prefix_cache_hit_tokens", "Prompt tokens brought back from --kv-cache-dir"),
    "kept_queried_tokens": (_COUNT, "external_prefix_cache_queried_tokens", "Prompt tokens looked up there"),
    "kept_read_bytes": (_COUNT, "kv_offload_load_bytes", "Bytes of KV blocks read there"),
    "kept_written_bytes": (_COUNT, "kv_offload_store_bytes", "Bytes of KV blocks written there"),
    "moved_tokens": (_COUNT, "kv_transfer_tokens", "Prompt tokens whose KV blocks came from another engine"),
    "lent_bytes": (_COUNT, "kv_transfer_lent_bytes", "Bytes of KV blocks lent to other engines"),
    "kept_refused_files": (_COUNT, "kv_offload_refused_files", "Files there that were not as they had been written"),
    "kept_write_failures": (_COUNT, "kv_offload_write_failures", "Times that nothing could be written there"),
    "spec_drafts": (_COUNT, "spec_decode_drafts", "Drafts that steps have verified"),
    "spec_draft_tokens": (_COUNT, "spec_decode_draft_tokens", "Draft tokens that steps have verified"),
    "spec_accepted_tokens": (_COUNT, "spec_decode_accepted_tokens", "Draft tokens that were accepted"),
    "steps": (_COUNT, "engine_steps", "Steps of the engine"),
    "step_seconds": (_COUNT, "engine_step_seconds", "Time spent in them"),
}

BY_METHOD = (  # name, which count of a draft's, what it is
    ("spec_decode_drafts_by_method", "drafts", "Drafts that steps have verified, by their kind"),
    ("spec_decode_draft_tokens_by_method", "tokens", "Draft tokens that steps have verified, by the draft's kind"),
    ("spec_decode_accepted_tokens_by_method", "accepted", "Draft tokens that were accepted, by the draft's kind"),
)

# What other servers call the same, so that dashboards, autoscalers and routers made for them work: ours -> theirs
OTHERS = {
    "num_requests_running": ("vllm:num_requests_running", "lmdeploy:num_requests_running"),
    "num_requests_waiting": ("vllm:num_requests_waiting", "lmdeploy:num_requests_waiting"),
    "kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "lmdeploy:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions",),
    "prefix_cache_hit_tokens": ("vllm:prefix_cache_hits",),
    "prefix_cache_queried_tokens": ("vllm:prefix_cache_queries",),
    "external_prefix_cache_hit_tokens": ("vllm:external_prefix_cache_hits",),
    "external_prefix_cache_queried_tokens": ("vllm:external_prefix_cache_queries",),
    "kv_offload_load_bytes": ("vllm:kv_offload_load_bytes",),
    "kv_offload_store_bytes": ("vllm:kv_offload_store_bytes",),
    "spec_decode_drafts": ("vllm:spec_decode_num_drafts",),
    "spec_decode_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "spec_decode_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "spec_decode_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
    "prompt_tokens": ("vllm:prompt_tokens", "lmdeploy:prompt_tokens"),
    "cached_tokens": ("lmdeploy:cached_tokens",),
    "generation_tokens": ("vllm:generation_tokens", "lmdeploy:generation_tokens"),
    "request_finished": ("vllm:request_success", "lmdeploy:request_success"),
    "time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", "lmdeploy:time_to_first_token_seconds"),
    "time_per_output_token_seconds": (
        "vllm:request_time_per_output_token_seconds",
        "lmdeploy:time_per_output_token_seconds",
    ),
    "inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "lmdeploy:iter_token_latency",
    ),
    "e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", "lmdeploy:e2e_request_latency_seconds"),
    "request_prompt_tokens": ("vllm:request_prompt_tokens", "lmdeploy:request_prompt_tokens"),
    "request_generation_tokens": ("vllm:request_generation_tokens", "lmdeploy:request_generation_tokens"),
}


class _EngineCollector(Collector):
    """Reads the engine's own figures when they are scraped."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self.stats = stats

    def collect(self) -> Iterable[Metric]:
        values = self.stats()
        for key, (kind, name, text) in FROM_ENGINE.items():
            # 0 until the engine has told: a dashboard needs the series from the start
            yield kind(PREFIX + name, text, value=float(values.get(key, 0)))
        text = "Those by their position in the draft"
        placed = CounterMetricFamily(PREFIX + "spec_decode_accepted_tokens_per_pos", text, labels=["position"])
        for place, count in enumerate(values.get("spec_accepted_by_place", ())):
            placed.add_metric([str(place)], float(count))
        yield placed
        for name, what, text in BY_METHOD:
            told = CounterMetricFamily(PREFIX + name, text, labels=["method"])
            for method, count in values.get("spec_by_method", {}).items():
                told.add_metric([method], float(count[what]))
            yield told


class _AllNames(Collector):
    """The metrics of a registry, and behind them those of OTHERS by their names, with the labels that those servers
    give them. The registry is asked once a scrape: asking it asks the engine."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self.labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        metrics = list(self.registry.collect())
        yield from metrics
        for ours in metrics:
            for name in OTHERS.get(ours.name.removeprefix(PREFIX), ()):
                theirs = Metric(name, ours.documentation, ours.type)
                for sample in ours.samples:
                    kind = sample.name.removeprefix(ours.name)
                    if kind != "_created":
                        theirs.add_sample(name + kind, sample.labels | self.labels, sample.value)
                yield theirs


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no event loop runs here
        return 0


class ServerMetrics:
    """Counters and histograms of requests, and the engine's gauges; ``traces``: where spans of requests go."""

    def __init__(
        self, stats: Callable[[], Mapping[str, Any]], traces: Traces | None = None, model_name: str = ""
    ) -> None:
        self.traces = traces
        self.registry = CollectorRegistry()
        self.everything = CollectorRegistry()
        self.everything.register(_AllNames(self.registry, model_name))
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineCollector(stats))
        counter, histogram = self._counter, self._histogram
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, counted when the prompt is through")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens served from the prefix cache")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.finished = counter("request_finished", "Requests (choices) ended, by reason", "finished_reason")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT)
        self.tpot = histogram("time_per_output_token_seconds", "Mean time per token after the first", _TPOT)
        self.itl = histogram("inter_token_latency_seconds", "Time from one token of an answer to the next", _TPOT)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token", _E2E)
        self.prompt_size = histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.answer_size = histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        told = "Arrival to first token by user: the key's name; empty for requests without a key"
        self.waits = histogram("user_wait_seconds", told, _WAITS, "user")
        told = "Requests refused by a limit of their key, by user and limit"
        self.refusals = counter("user_refused", told, "user", "limit")
        tasks = Gauge(PREFIX + "asyncio_tasks", "Tasks of the server's event loop", registry=self.registry)
        tasks.set_function(_tasks)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)

    def refused(self, user: str, limit: str) -> None:
        """A request of ``user`` was refused by ``limit``."""
        self.refusals.labels(user, limit).inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.everything)


class RequestClock:
    """Times one choice of ``user`` from its creation to ``finish`` and books it: its tokens as they come, the rest at
    its end. ``reason``: that of its end, the finish_reason of its choice (``abort`` for a client that went away)."""

    def __init__(self, metrics: ServerMetrics, prompt_tokens: int, user: str = "") -> None:
        self.metrics = metrics
        self.user = user
        self.prompt_tokens = prompt_tokens
        self.start = time.perf_counter()
        self.request = current()
        self.first: float | None = None
        self.last = 0.0
        self.tokens = 0
        self.cached_tokens = 0
        self.reason = "abort"

    def tokens_arrived(self, count: int, cached_tokens: int) -> None:
        """``count`` more have been generated; the prompt is through by then, ``cached_tokens`` of it from the cache."""
        if self.first is None:
            self.cached_tokens = cached_tokens
        if not count:
            return
        now = time.perf_counter()
        if self.first is None:
            self.first = now
            self.metrics.ttft.observe(now - self.start)
            self.metrics.waits.labels(self.user).observe(now - self.start)
            self._book_prompt()
        else:
            self.metrics.itl.observe(now - self.last)
        self.last = now
        self.tokens += count
        self.metrics.generation_tokens.inc(count)

    def finish(self) -> None:
        """Book the end."""
        end, reason = time.perf_counter(), self.reason
        self.metrics.finished.labels(reason).inc()
        if self.metrics.traces is not None:
            self.metrics.traces.record(
                self.request,
                self.start,
                self.first,
                usage__prompt_tokens=self.prompt_tokens,
                usage__completion_tokens=self.tokens,
                usage__cached_tokens=self.cached_tokens,
                response__finish_reason=reason,
            )
        if self.first is None:
            self._book_prompt()
        if reason in ("stop", "length"):
            self.metrics.e2e.observe(end - self.start)
            self.metrics.prompt_size.observe(self.prompt_tokens)
            self.metrics.answer_size.observe(self.tokens)
            if self.first is not None and self.tokens > 1:
                self.metrics.tpot.observe((end - self.first) / (self.tokens - 1))

    def _book_prompt(self) -> None:
        self.metrics.prompt_tokens.inc(self.prompt_tokens)
        self.metrics.cached_tokens.inc(self.cached_tokens)
