"""What an operator sees of requests: their names, the log, traces, and the dashboard."""

from __future__ import annotations

import http.server
import json
import logging
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.base import json_lines
from toolkit.errors import UsageError
from toolkit.serve.watch import log, traces

BODY = {"model": "echo", "prompt": "hello", "max_tokens": 5}
DASHBOARD = Path(__file__).parents[2] / "deploy/monitoring/grafana/dashboards/toolkit.json"


def ask(url: str, headers: dict[str, str], body: Any = BODY) -> Any:
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        return error


def test_requests_have_names_that_come_back(start: Any) -> None:
    url = start(api_keys=["k"]).url
    key = {"authorization": "Bearer k"}
    assert ask(url, {**key, "x-request-id": "mine/1"}).headers["x-request-id"] == "mine/1"
    made = [ask(url, {**key, "x-request-id": given}).headers["x-request-id"] for given in ("two words", "x" * 200, "")]
    assert len(set(made)) == 3 and all(re.fullmatch("[0-9a-f]{32}", name) for name in made)
    for refused in (ask(url, {"x-request-id": "no-key"}), ask(url, {**key, "x-request-id": "no-key"}, {"a": 1})):
        assert refused.status in (401, 400) and refused.headers["x-request-id"] == "no-key"


def test_a_log_of_json_has_the_request_s_name(start: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log.begin("info", "json")
    url = start(engine={"fail_after": 1}).url
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "level", logging.INFO)
    ask(url, {"x-request-id": "wanted"}).read()
    logging.getLogger("toolkit.serve").error("two\nlines", exc_info=ValueError("why"))
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    (answered,) = [line for line in lines if line["logger"] == "uvicorn.access"]
    assert answered["request_id"] == "wanted" and answered["path"] == "/v1/completions" and answered["status"] == 500
    assert lines[-1]["message"] == "two\nlines" and "ValueError: why" in lines[-1]["exception"]
    assert json_lines.are_written(), "the engine's process follows"
    assert "request_id" not in lines[-1] and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z", lines[-1]["time"])


@pytest.mark.parametrize("form", log.LOG_FORMATS)
def test_lines_about_a_prompt_have_the_request_s_name(
    start: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    logging.getLogger("toolkit").setLevel(logging.NOTSET)  # which a pipeline in this process may have changed
    log.begin("info", form)
    body = {"model": "echo", "messages": "hello", "max_tokens": 5}
    headers = {"x-request-id": "wanted", "content-type": "application/json"}
    url = start().url + "/v1/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60).read()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if ": prompt " in line]
    assert "toolkit.serve: [wanted] " in line if form == "text" else json.loads(line)["request_id"] == "wanted"


@pytest.mark.parametrize("given", [("loud", "text"), ("info", "xml")])
def test_unknown_levels_and_formats_are_refused(given: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=r"--log-(level|format): expected one of"):
        log.begin(*given)


@pytest.fixture
def collector() -> Iterator[Any]:
    """A collector's URL, and the bodies it gets."""
    got: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    server.shutdown()
    server.server_close()


def test_a_span_for_each_choice_within_the_client_s_trace(start: Any, collector: Any) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url, got = collector
    server = start(otlp_traces_endpoint=url)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"x-request-id": "r1", "traceparent": f"00-{trace}-{parent}-01"}
    ask(server.url, headers, {**BODY, "n": 2}).read()
    server.app.state.server.metrics.traces.close()
    spans = [
        span
        for body in got
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert len(spans) == 2
    for span in spans:
        told = {a.key: a.value for a in span.attributes}
        assert span.trace_id.hex() == trace and span.parent_span_id.hex() == parent
        assert told["gen_ai.request.id"].string_value == "r1"
        assert told["gen_ai.usage.prompt_tokens"].int_value == told["gen_ai.usage.completion_tokens"].int_value == 5
        first = told["gen_ai.latency.time_to_first_token"].double_value
        assert 0 < first <= told["gen_ai.latency.e2e"].double_value
        assert span.start_time_unix_nano < span.events[0].time_unix_nano <= span.end_time_unix_nano


def test_traces_that_cannot_be_sent_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="expected the address"):
        traces.check("localhost:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(UsageError, match=r"otlp-traces-endpoint.*opentelemetry"):
        traces.check("http://localhost:4318/v1/traces")


def test_every_metric_of_the_dashboard_is_there(start: Any) -> None:
    url = start().url
    ask(url, {}).read()
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        told = set(re.findall(r"^(toolkit:\w+)", reply.read().decode(), re.MULTILINE))
    used = set(re.findall(r"toolkit:\w+", DASHBOARD.read_text()))
    assert len(used) > 10 and used <= told, used - told


def test_metrics_have_the_names_of_other_servers_too(start: Any) -> None:
    url = start().url
    ask(url, {}).read()
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if '{engine="0"' in line}
    for theirs in ("vllm:prompt_tokens_total", "lmdeploy:generation_tokens_total"):
        ours = theirs.replace("vllm:", "toolkit:").replace("lmdeploy:", "toolkit:")
        assert values[theirs] == next(float(line.split()[1]) for line in lines if line.startswith(f"{ours} ")) > 0
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert name in values  # what routers and autoscalers read
    assert values["vllm:request_success_total"] == values["vllm:e2e_request_latency_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == values["lmdeploy:generation_tokens_total"] - 1
    assert any(line.startswith("process_open_fds") for line in lines)
