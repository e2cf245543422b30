"""Prometheus metrics of one proxy, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit.serve.proxy.nodes import Nodes

PREFIX = "toolkit_proxy:"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _NodeCollector(Collector):
    """Reads the nodes when they are scraped."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(PREFIX + "node_up", "1 while a node gets requests", labels=["node"])
        running = GaugeMetricFamily(PREFIX + "node_requests_running", "Requests a node is answering", labels=["node"])
        for node in self._nodes:
            up.add_metric([node.label], float(node.down is None))
            running.add_metric([node.label], node.unfinished)
        return [up, running]


class ProxyMetrics:
    """Counters of requests; the nodes' gauges."""

    def __init__(self, nodes: Nodes) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_NodeCollector(nodes))
        self.requests = Counter(
            PREFIX + "requests", "Answers by node and status; 0: none came", ["node", "status"], registry=self.registry
        )
        self.retries = Counter(PREFIX + "retries", "Requests sent to another node", registry=self.registry)
        self.broken = Counter(PREFIX + "broken_answers", "Answers that broke off", registry=self.registry)
        self.seconds = Histogram(
            PREFIX + "request_seconds",
            "Time of a node's whole answer",
            ["node"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
