"""OpenTelemetry traces (``--otlp-traces-endpoint``): one span for each choice of each request, with vLLM's names."""

from __future__ import annotations

import time
from typing import Any

from toolkit.base.extras import explain
from toolkit.errors import UsageError
from toolkit.serve.http.request_ids import Named

OPTION = "--otlp-traces-endpoint"


def check(endpoint: str | None) -> None:
    """Raise UsageError for an address that is none, or where the packages are missing."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"{OPTION}: expected the address of a collector (OTLP over HTTP), found {endpoint!r}")
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{OPTION}: {explain(error) or error}") from error


class Traces:
    """Sends spans of ``model`` in the background to ``endpoint``, such as http://localhost:4318/v1/traces."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "toolkit", "gen_ai.response.model": model})
        self._provider = TracerProvider(resource=resource)  # at the end of the process it sends what is left
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("toolkit.serve")

    def record(self, request: Named | None, started: float, first: float | None, **attributes: Any) -> None:
        """A span from ``started`` to now, its ``first`` token between (times of ``time.perf_counter``)."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, now_ns = time.perf_counter(), time.time_ns()
        told = {f"gen_ai.{name.replace('__', '.')}": value for name, value in attributes.items()}
        told["gen_ai.latency.e2e"] = now - started
        if first is not None:
            told["gen_ai.latency.time_to_first_token"] = first - started
        parent = None
        if request is not None:
            told["gen_ai.request.id"] = request.id
            parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent or ""})
        start_ns = now_ns - int((now - started) * 1e9)
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, told, start_time=start_ns)
        if first is not None:
            span.add_event("first token", timestamp=now_ns - int((now - first) * 1e9))
        span.end(now_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
