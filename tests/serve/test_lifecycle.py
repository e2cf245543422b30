"""Disconnects, metrics, documentation, cross-origin calls."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.errors import ToolkitError
from toolkit.serve import run
from toolkit.serve.options import ServerSettings
from toolkit.serve.run import bind, listen
from toolkit.serve.watch.metrics import ServerMetrics


def fetch(url: str, headers: dict[str, str] | None = None) -> tuple[Any, str]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=60) as reply:
        return reply, reply.read().decode()


def post(server: Any, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave the connection open."""
    data = json.dumps({"model": "echo", **body}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_aborts_every_choice(start: Any, stream: bool, n: int) -> None:
    server = start(engine={"delay": 0.05})
    connection = post(server, "/v1/completions", {"prompt": "x" * 400, "stream": stream, "n": n})
    server.wait(lambda: len(server.engine.running) == n)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    connection.close()
    server.wait(lambda: not server.engine.running)
    assert len(server.engine.aborted) == n
    server.wait(lambda: f'finished_reason="abort"}} {n}.0' in fetch(f"{server.url}/metrics")[1])


def test_a_failing_choice_ends_its_siblings_only(start: Any) -> None:
    server = start(engine={"delay": 0.005, "fail_after": 5})
    bad = post(server, "/v1/completions", {"prompt": ["x" * 300, "y" * 4]})
    assert b"500 Internal" in bad.recv(4000)
    server.wait(lambda: not server.engine.running)
    good = post(server, "/v1/completions", {"prompt": "abc"})
    assert b"200 OK" in good.recv(4000)
    bad.close()
    good.close()


def test_shutting_down_tells_the_clients(start: Any) -> None:
    server = start(engine={"delay": 0.02})
    connection = post(server, "/v1/completions", {"prompt": "x" * 400, "stream": True})
    server.wait(lambda: len(server.engine.running) == 1)
    assert b"200 OK" in connection.recv(1000)
    state = server.app.state.server
    state.closing = True
    state.abort_all()
    seen = b""
    while b"[DONE]" not in seen:
        part = connection.recv(65536)
        assert part
        seen += part
    assert b"shutting down" in seen
    connection.close()
    late = post(server, "/v1/completions", {"prompt": "abc"})
    assert b"503" in late.recv(1000)
    late.close()


EARLY = """
import signal
from toolkit.serve.proxy.run import serve
from toolkit.serve.options import ProxySettings
serve(ProxySettings(server_port=0, log_level="error"), lambda url: signal.raise_signal(signal.SIGTERM))
"""


def test_sigterm_ends_a_proxy_in_order_as_soon_as_it_can_be_reached() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", EARLY], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_metrics(start: Any) -> None:
    server = start()
    post(server, "/v1/completions", {"prompt": "abcd", "max_tokens": 3}).recv(4000)
    reply, text = fetch(f"{server.url}/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    assert float(values["toolkit:prompt_tokens_total"]) == 4
    assert float(values["toolkit:generation_tokens_total"]) == 3
    assert float(values["toolkit:cached_tokens_total"]) == 3
    assert float(values['toolkit:request_finished_total{finished_reason="length"}']) == 1
    assert float(values["toolkit:kv_cache_usage_perc"]) == 0.25
    assert float(values["toolkit:num_requests_running"]) == 0
    assert float(values["toolkit:preemptions_total"]) == 2
    for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"):
        assert float(values[f"toolkit:{name}_count"]) == 1


def test_counters_move_while_an_answer_streams(start: Any) -> None:
    server = start(engine={"delay": 0.02})
    connection = post(server, "/v1/completions", {"prompt": "x" * 400, "stream": True})
    seen: list[float] = []

    def generated() -> float:
        lines = fetch(f"{server.url}/metrics")[1].splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("toolkit:"))
        if (now := float(values["toolkit:generation_tokens_total"])) > 0:
            assert (values["toolkit:prompt_tokens_total"], values["toolkit:cached_tokens_total"]) == ("400.0", "3.0")
            seen.append(now)
        return now

    server.wait(lambda: generated() > 0 and len(set(seen)) > 1)
    assert server.engine.running
    connection.close()
    server.wait(lambda: not server.engine.running)
    text = fetch(f"{server.url}/metrics")[1]
    assert "toolkit:prompt_tokens_total 400.0" in text and "toolkit:cached_tokens_total 3.0" in text


def test_gauges_are_there_before_the_engine_has_told_anything() -> None:
    text = ServerMetrics(dict).render().decode()
    assert "toolkit:num_requests_running 0.0" in text and "toolkit:kv_cache_usage_perc 0.0" in text


def test_a_scrape_asks_the_engine_once() -> None:
    asked: list[Any] = []
    text = ServerMetrics(lambda: {"running": asked.append(1) or 3}).render().decode()
    assert asked == [1] and "vllm:num_requests_running" in text


def test_a_port_that_another_program_listens_on_first() -> None:
    ours = bind("127.0.0.1", 0)
    theirs = bind("127.0.0.1", ours.getsockname()[1])  # both may bind while nobody listens
    with ours, theirs:
        listen(theirs)
        with pytest.raises(ToolkitError, match="in use"):
            listen(ours)


@pytest.mark.parametrize("host", ["0.0.0..0", "a" * 64])
def test_a_host_that_can_be_no_name(host: str) -> None:
    with pytest.raises(ToolkitError, match=f"--server-name {host}: not an address of this machine"):
        bind(host, 0)


def test_a_port_of_the_system_s_is_bound_with_a_word(monkeypatch: Any, caplog: Any) -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    assert not caplog.records
    monkeypatch.setattr("toolkit.serve.run.PRIVILEGED", 65536)
    with bind("127.0.0.1", port):
        (told,) = caplog.messages
    assert told.startswith(f"--server-port {port}: below 65536 are ports of the system's own services")


def test_that_the_server_is_ready_is_said_once(monkeypatch: Any, capsys: Any) -> None:
    from toolkit.commands.options import EngineFlags
    from toolkit.commands.serve import api_server
    from toolkit.serve.options import ServerSettings

    monkeypatch.setattr("toolkit.serve.run.serve", lambda model, settings, *, ready, **more: ready("http://x:1", None))
    monkeypatch.setattr(api_server, "show_engine", lambda console, engine: None)
    engine = EngineFlags()
    api_server.serve_one("m", ServerSettings(), engine, engine.config())
    err = capsys.readouterr().err
    assert err.count("The server is ready") == 1 and err.count("http://x:1") == 2


def test_two_servers_have_their_own_metrics(start: Any) -> None:
    first, second = start(), start()
    post(first, "/v1/completions", {"prompt": "abcd"}).recv(4000)
    assert "toolkit:prompt_tokens_total 4.0" in fetch(f"{first.url}/metrics")[1]
    assert "toolkit:prompt_tokens_total 0.0" in fetch(f"{second.url}/metrics")[1]


def test_documentation(start: Any) -> None:
    server = start()
    assert "swagger" in fetch(f"{server.url}/docs")[1].lower()
    document = json.loads(fetch(f"{server.url}/openapi.json")[1])
    schemas = document["components"]["schemas"]
    assert {"temperature", "messages"} <= set(schemas["ChatCompletionRequest"]["properties"])
    used = json.dumps(document).split('"#/components/schemas/')[1:]
    assert {ref.split('"')[0] for ref in used} <= set(schemas)
    bare = start(disable_fastapi_docs=True)
    for path in ("/docs", "/openapi.json", "/docs/swagger-ui-bundle.js"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(bare.url + path)


@pytest.mark.parametrize("no_page", [False, True])
def test_the_documentation_needs_no_internet(start: Any, no_page: bool) -> None:
    """All that the page names comes from this server, without a key too, as the page does."""
    url = f"{start(no_page=no_page, api_keys=['secret']).url}/{'' if no_page else 'docs'}"
    page = fetch(url)[1]
    named = re.findall(r"""(?:src|href)=["']([^"']+)|url: *["']([^"']+)""", page)
    names = [one or other for one, other in named]
    assert {name.rpartition("/")[2] for name in names} > {"swagger-ui-bundle.js", "swagger-ui.css", "openapi.json"}
    assert not re.search(r"https?://", page)
    for name in names:
        if not name.startswith("data:"):
            assert len(fetch(urllib.parse.urljoin(url, name))[1]) > 1000, name


def test_the_table_of_what_is_tested_has_every_route(start: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "server-tests.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`([^`]+)`", text))
    documented = set(json.loads(fetch(f"{start().url}/openapi.json")[1])["paths"])
    assert {path.replace(":path", "") for path in documented} <= told, documented - told
    files = [name for name in told if name.endswith(".py")]
    assert len(files) > 8 and all((Path(__file__).parent / name).exists() for name in files)


def test_cross_origin(start: Any) -> None:
    origin = {"Origin": "http://a.example"}
    assert "access-control-allow-origin" not in fetch(f"{start().url}/v1/models", origin)[0].headers
    any_ = start(allow_origins=["*"])
    assert fetch(f"{any_.url}/v1/models", origin)[0].headers["access-control-allow-origin"] == "*"
    some = start(allow_origins=["http://a.example"], api_keys=["k"])
    reply, _ = fetch(f"{some.url}/health", origin)
    assert reply.headers["access-control-allow-origin"] == "http://a.example"
    assert "access-control-allow-origin" not in fetch(f"{some.url}/health", {"Origin": "http://b.example"})[0].headers


def test_load_balancers_may_ask_for_the_head_alone(start: Any) -> None:
    asked = urllib.request.Request(f"{start(api_keys=['k']).url}/health", method="HEAD")
    with urllib.request.urlopen(asked, timeout=60) as reply:
        assert reply.status == 200 and reply.read() == b""


def test_metrics_can_be_turned_off(start: Any) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(f"{start(disable_metrics=True).url}/metrics")


@pytest.mark.parametrize("kind", [TurbomindEngineConfig, PytorchEngineConfig])
@pytest.mark.parametrize("wanted", [True, False])
def test_enable_metrics_of_the_engine_decides(kind: Any, wanted: bool, tmp_path: Any, monkeypatch: Any) -> None:
    engine = SimpleNamespace(
        tokenizer=SimpleNamespace(path=tmp_path),
        model_name="m",
        adapters=SimpleNamespace(names=()),
        session_len=9,
        blind=False,
        weights=SimpleNamespace(asleep=False),
        stats=dict,
        end_session=lambda name: None,
        close=lambda: None,
    )
    apps: list[Any] = []
    monkeypatch.setattr(run.AsyncEngine, "open", lambda *args, **options: engine)
    monkeypatch.setattr(
        run.ChatTemplate,
        "open",
        lambda *args: SimpleNamespace(tool_format=None, reasoning_format=None, parse_special=False, forgery=None),
    )
    monkeypatch.setattr(run, "run_app", lambda app, *rest: apps.append(app))
    config = kind(enable_metrics=wanted)
    run.serve("m", ServerSettings(server_port=0), engine_config=config, progress=print, ready=lambda url, engine: None)
    assert ("/metrics" in {getattr(r, "path", None) for r in apps[0].routes}) == wanted
