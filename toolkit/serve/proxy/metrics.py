"""Prometheus metrics of one proxy, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit.serve.proxy.nodes import Nodes

PREFIX, OF_MODELS = "toolkit_proxy:", "toolkit_models:"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _NodeCollector(Collector):
    """Reads the nodes when they are scraped."""

    def __init__(self, nodes: Nodes, prefix: str, kind: str) -> None:
        self._nodes, self._prefix, self._kind = nodes, prefix, kind

    def collect(self) -> Iterable[Metric]:
        kind, name = self._kind, self._prefix + self._kind
        up = GaugeMetricFamily(f"{name}_up", f"1 while a {kind} gets requests", labels=[kind])
        running = GaugeMetricFamily(f"{name}_requests_running", f"Requests a {kind} is answering", labels=[kind])
        for node in self._nodes:
            up.add_metric([node.label], float(node.down is None))
            running.add_metric([node.label], node.unfinished)
        return [up, running]


class ProxyMetrics:
    """Counters of requests; the nodes' gauges. ``of_models``: each node is a model of one server."""

    def __init__(self, nodes: Nodes, of_models: bool = False) -> None:
        prefix, kind = (OF_MODELS, "model") if of_models else (PREFIX, "node")
        self._kind = kind
        self.registry = CollectorRegistry()
        self.registry.register(_NodeCollector(nodes, prefix, kind))
        told = f"Answers by {kind} and status; 0: none came"
        self.requests = Counter(prefix + "requests", told, [kind, "status"], registry=self.registry)
        self.retries = Counter(prefix + "retries", f"Requests sent to another {kind}", registry=self.registry)
        self.broken = Counter(prefix + "broken_answers", "Answers that broke off", registry=self.registry)
        told = "Prompts that another node has computed (lent), or was to and has not (alone)"
        self.lent = Counter(prefix + "prompts", told, ["how"], registry=None if of_models else self.registry)
        told = f"Time of a {kind}'s whole answer"
        self.seconds = Histogram(prefix + "request_seconds", told, [kind], buckets=_SECONDS, registry=self.registry)

    def forget(self, label: str) -> None:
        """Tell no more of a node that is gone: where nodes come and go, each may have an address of its own."""
        samples = [sample for metric in self.requests.collect() for sample in metric.samples]
        statuses = {sample.labels["status"] for sample in samples if sample.labels[self._kind] == label}
        for status in statuses:
            self.requests.remove(label, status)
        if statuses:
            self.seconds.remove(label)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
