"""The load client: what it sends, what it makes of a server's stream, and its command."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from toolkit.commands.main import app
from toolkit.errors import ToolkitError, UsageError
from toolkit.profile.http_client import Client, TextAsk, spread
from toolkit.profile.metrics import RequestRecord, goodput, percentiles
from toolkit.profile.options import Traffic
from toolkit.profile.plot import plot_sweep
from toolkit.profile.serving import columns, measure
from toolkit.profile.workload import dataset_texts, random_texts


class OpenAI(BaseHTTPRequestHandler):
    """Answers ``max_tokens`` tokens, two a chunk, 10 ms apart; what a prompt says may go wrong does."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict[str, Any]]
    keys: set[str | None]
    now: list[Any]  # being answered

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def answer(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append({"path": self.path, "beside": len(self.now), **asked})
        self.now.append(self)
        self.keys.add(self.headers["Authorization"])
        text = asked["prompt"] if "prompt" in asked else asked["messages"][0]["content"]
        if "refuse" in text:
            self.answer(429, {"error": {"message": "too much [/INST]"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(asked["max_tokens"] // 2):
            time.sleep(0.01)
            piece = {"text": "ab"} if "prompt" in asked else {"delta": {"content": "ab"}}
            self.event({"choices": [piece]})
            if "break" in text:
                return
            if "fail" in text:
                self.event({"error": {"message": "the engine failed"}})
                return
        self.now.remove(self)
        usage: Any = {"prompt_tokens": 7, "completion_tokens": asked["max_tokens"]}
        odd = {"text": "many", "list": [], "huge": {"prompt_tokens": -1, "completion_tokens": 10**12}}
        self.event({"choices": [], "usage": next((odd[name] for name in odd if f"odd {name}" in text), usage)})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[Any]:
    """(url, handler class)."""
    handler = type("Handler", (OpenAI,), {"bodies": [], "keys": set(), "now": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_address[1]}", handler
        found.shutdown()


def run_one(client: Client, text: str, tokens: int = 8) -> RequestRecord:
    async def go() -> RequestRecord:
        await client.choose_model()
        return client.record(await client.run(TextAsk(text, tokens)))

    return asyncio.run(go())


@pytest.mark.parametrize("kind", ["text", "list", "huge"])
def test_usage_that_cannot_be_counts_as_none(server: Any, kind: str) -> None:
    record = run_one(Client(f"{server[0]}/v1/", None, "chat", "secret", {}), f"odd {kind}")
    assert (record.error, record.input_tokens) == (None, 0)
    assert [count for _, count in record.arrivals] == [1, 1, 1, 1]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_one_request(server: Any, endpoint: Any) -> None:
    url, handler = server
    record = run_one(Client(f"{url}/v1/", None, endpoint, "secret", {"temperature": 0.5}), "hello")
    assert record.error is None and record.input_tokens == 7
    assert [count for _, count in record.arrivals] == [2, 2, 2, 2]  # as the usage says
    assert 0.009 < record.ttft < record.e2e and record.e2e > 0.035
    sent = handler.bodies[-1]
    assert sent["path"] == ("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")
    assert sent["model"] == "first" and sent["temperature"] == 0.5 and sent["max_tokens"] == 8
    assert sent["stream"] and sent["stream_options"] == {"include_usage": True}
    assert handler.keys == {"Bearer secret"}


@pytest.mark.parametrize(("text", "says"), [("refuse", "HTTP 429: too much"), ("fail", "the engine failed")])
def test_failures_are_noted(server: Any, text: str, says: str) -> None:
    assert says in (run_one(Client(server[0]), text).error or "")


def test_an_unreachable_server_is_one_line() -> None:
    with pytest.raises(ToolkitError, match=r"http://127.0.0.1:9: cannot be reached"):
        run_one(Client("http://127.0.0.1:9"), "a")
    with pytest.raises(UsageError, match="address of a server"):
        Client("127.0.0.1:80")
    with pytest.raises(UsageError, match="without user and password"):
        Client("http://me:secret@127.0.0.1:80")


def test_an_unknown_model_is_one_line(server: Any) -> None:
    with pytest.raises(ToolkitError, match="found first, second there"):
        run_one(Client(server[0], "third"), "a")


def test_tokens_are_spread_by_characters() -> None:
    assert spread([(1.0, 3), (2.0, 3)], 2) == [(1.0, 1), (2.0, 1)]
    assert spread([(1.0, 1), (2.0, 9)], 12) == [(1.0, 2), (2.0, 10)]
    assert sum(n for _, n in spread([(float(i), i + 1) for i in range(9)], 100)) == 100
    assert spread([], 0) == []
    assert spread([(1.0, 2)], 0) == [(1.0, 1)]  # a server that does not tell


def test_runs_of_a_sweep(server: Any, tmp_path: Path) -> None:
    url, handler = server
    traffic = Traffic(
        num_prompts=4, request_rate=(200.0, float("inf")), concurrency=(1, 4), random_input_len=5, random_output_len=4,
        metric_percentiles=(50, 90), limits={"ttft": 1e6, "e2e_latency": 1e6},
    )  # fmt: skip
    done: list[Any] = []
    runs = asyncio.run(measure(Client(url), traffic, on_done=done.append))
    rows = [run.row for run in runs]
    assert [(r["request_rate"], r["max_concurrency"]) for r in rows] == [(200, 1), (200, 4), (None, 1), (None, 4)]
    assert len(done) == 16 and all(r["completed"] == 4 and r["failed"] == 0 for r in rows)
    assert list(rows[0]) == columns(traffic)
    for r in rows:
        assert r["goodput"] == pytest.approx(r["request_throughput"]) and r["total_output_tokens"] == 16
        assert 0 < r["p50_ttft_ms"] <= r["p90_ttft_ms"] and r["p50_itl_ms"] == pytest.approx(r["median_itl_ms"])
    beside = [b["beside"] for b in handler.bodies[1:]]  # the first is to warm up
    assert not any(beside[:4] + beside[8:12]) and 1 <= max(beside[12:]) <= 3  # one after the other, and together
    prompts = [b["prompt"] for b in handler.bodies]
    assert len(set(prompts)) == len(prompts) == 17  # no run asks what another has asked
    plot_sweep(rows, "title", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_drawings_to_completions_are_refused(server: Any) -> None:
    shown = ("--dataset-name", "image", "--image-size", "20x10", "--num-prompts", "1", "--random-output-len", "2")
    for option in (("--endpoint", "completions"), ("--backend", "vllm")):
        with pytest.raises(UsageError, match=r"--endpoint .*: expected chat, .* found 'completions'"):
            app(args=["profile", "api_server", server[0], *shown, *option], standalone_mode=False)
    with pytest.raises(UsageError, match="expected chat"):
        asyncio.run(measure(Client(server[0]), Traffic(dataset="image", num_prompts=1)))


def test_two_options_may_not_name_two_endpoints(server: Any) -> None:
    asked = ("profile", "api_server", server[0], "--num-prompts", "1", "--random-output-len", "2", "--endpoint", "chat")
    with pytest.raises(UsageError, match="expected one endpoint, found --endpoint chat and --backend vllm;"):
        app(args=[*asked, "--backend", "vllm"], standalone_mode=False)
    app(args=[*asked, "--backend", "vllm-chat"], standalone_mode=False)
    assert {sent["path"] for sent in server[1].bodies} == {"/v1/chat/completions"}


def test_all_requests_failing_is_an_error(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("please do refuse this one")
    with pytest.raises(ToolkitError, match="all 2 requests failed; the first one said: HTTP 429"):
        asyncio.run(measure(Client(server[0]), Traffic(dataset=str(file), num_prompts=2, random_output_len=4)))


def test_goodput_and_percentiles() -> None:
    fast = RequestRecord(1, 0.0, [(0.1, 1), (0.2, 1), (0.3, 1)])
    slow = RequestRecord(1, 0.0, [(0.1, 1), (0.2, 1), (0.9, 1)])
    failed = RequestRecord(1, 0.0, [(0.1, 1)], error="x")
    records = [fast, slow, failed]
    assert goodput(records, {"ttft": 150}, 2.0) == 1.0
    assert goodput(records, {"ttft": 150, "itl": 500}, 2.0) == 0.5
    assert goodput(records, {"e2e_latency": 250}, 2.0) == 0.0
    found = percentiles(records, (0, 100))
    assert found["p0_e2e_latency_ms"] == pytest.approx(300) and found["p100_itl_ms"] == pytest.approx(700)
    assert percentiles([], (99,))["p99_ttft_ms"] == 0


def test_texts(tmp_path: Path) -> None:
    texts = random_texts(3, None, 5, 12)
    assert texts == random_texts(3, None, 5, 12) != random_texts(4, None, 5, 12)
    assert [len(text.split()) for text in texts] == [12] * 5
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "one two three four", "completion": "a b c d e"}))
    assert dataset_texts(file, 0, None, 2, None) == [("one two three four", 5)] * 2
    assert dataset_texts(file, 0, None, 1, 9) == [("one two three four", 9)]


# -- the command ------------------------------------------------------------------------------------------


def test_the_command_on_a_model(support: Any, tiny_models: Any, tmp_path: Path) -> None:
    """A server of its own is started, measured with the model's tokenizer, and ended."""
    flags = ["--num-prompts", 3, "--concurrency", "1,3", "--random-input-len", 20, "--random-output-len", 5]
    files = ["--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.png"]
    done = support("command").tool(
        "profile", "api_server", tiny_models("llama"), *flags, "--goodput", "ttft:60000", "e2el:60000", *files
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [(r["completed"], r["total_output_tokens"], r["max_concurrency"]) for r in rows] == [(3, 15, 1), (3, 15, 3)]
    assert all(50 <= r["total_input_tokens"] <= 70 and r["goodput"] > 0 for r in rows)
    assert len(list(csv.DictReader((tmp_path / "a.csv").open()))) == 2
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "goodput" in done.stdout and "run 2" in done.stdout


def test_the_command_on_a_server(support: Any, server: Any) -> None:
    url, handler = server
    flags = ["--num-prompts", 2, "--random-output-len", 4, "--temperature", 0.7, "--extra-body", '{"x": 1}']
    where = ["--base-url", url, "--model", "second", "--backend", "vllm-chat"]
    done = support("command").tool("profile", "restful-api", *where, *flags, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["completed"] == 2
    sent = handler.bodies[-1]
    assert (sent["model"], sent["temperature"], sent["x"], sent["ignore_eos"]) == ("second", 0.7, 1, True)
    assert "messages" in sent and "do_sample" not in sent


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        ([], {"temperature": 0.0}),
        (["--repetition-penalty", 1.1], {"temperature": 0.0, "repetition_penalty": 1.1}),
        (["--do-sample"], {"temperature": 1.0}),
        (["--top-p", 0.9], {"temperature": 1.0, "top_p": 0.9}),
        (["--greedy", "--temperature", 0.7], {"temperature": 0.0}),
        (["--extra-body", '{"temperature": 0.3}'], {"temperature": 0.3}),
    ],
)
def test_tokens_are_drawn_as_the_flags_say(server: Any, flags: list[Any], sent: dict[str, float]) -> None:
    url, handler = server
    args = ["profile", "api_server", url, "--num-prompts", 1, "--random-output-len", 2, *flags]
    app(args=[str(arg) for arg in args], standalone_mode=False)
    asked = handler.bodies[-1]
    assert {name: asked[name] for name in ("temperature", "top_p", "repetition_penalty") if name in asked} == sent


def test_what_a_server_says_is_shown_as_it_is(support: Any, server: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("please do refuse this one\n\nplease do answer this one")
    flags = ["--dataset", file, "--num-prompts", 2, "--random-output-len", 4]
    done = support("command").tool("profile", "api_server", server[0], *flags)
    assert done.returncode == 0 and "the first one said: HTTP 429: too much [/INST]" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "URL|MODEL"),
        (["http://127.0.0.1:9"], "cannot be reached"),
        (["http://127.0.0.1:9", "--request-rate", "1,x"], "--request-rate"),
        (["http://127.0.0.1:9", "--request-rate", "0"], "--request-rate"),
        (["http://127.0.0.1:9", "--concurrency", "1.5"], "--concurrency"),
        (["http://127.0.0.1:9", "--goodput", "speed:3"], "--goodput"),
        (["http://127.0.0.1:9", "--goodput", "ttft"], "--goodput"),
        (["http://127.0.0.1:9", "--extra-body", "[1]"], "--extra-body"),
        (["http://127.0.0.1:9", "--extra-body", "x"], "--extra-body: expected a JSON object, found 'x'"),
        (["http://127.0.0.1:9", "--backend", "tgi"], "--backend"),
        (["http://127.0.0.1:9", "--dataset", "/no/file"], "--dataset"),
        (["http://127.0.0.1:9", "--metric-percentiles", "101"], "--metric-percentiles"),
        (["http://127.0.0.1:9", "--temperature", "7"], "temperature: expected"),
        (["http://127.0.0.1:99999"], "expected the address of a server"),
        (["http://[::1"], "expected the address of a server"),
    ],
)
def test_misuse_is_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(ToolkitError, match=re.escape(says)) as raised:
        app(args=["profile", "api_server", *arguments], standalone_mode=False)
    assert "\n" not in str(raised.value)


def test_a_seed_below_its_least_is_one_line(support: Any) -> None:
    done = support("command").tool("profile", "api_server", "http://127.0.0.1:9", "--seed", "-1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--seed" in done.stderr
