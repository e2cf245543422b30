"""Metrics of a deployment: those of each replica, told apart by a label, and the front's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

PREFIX = "toolkit_ray:"


class FrontMetrics:
    """Counters of what went through the front."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        told = "Answers by model and status"
        self.requests = Counter(PREFIX + "requests", told, ["model", "status"], registry=self._registry)
        self.retries = Counter(PREFIX + "retries", "Requests sent to another replica", registry=self._registry)
        self.broken = Counter(PREFIX + "broken_answers", "Answers that broke off", registry=self._registry)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


def merged(found: Sequence[tuple[str, bytes]]) -> bytes:
    """One text of those of replicas, (name, text) each: every metric once, its samples with a label ``replica``."""
    families: dict[str, Metric] = {}
    for name, text in found:
        for family in text_string_to_metric_families(text.decode()):
            one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                one.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value)

    class _Found(Collector):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(_Found())
    return generate_latest(registry)
