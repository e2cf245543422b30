"""Every limit refuses what is beyond it, names its option, and does so before the work that it is there to prevent."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import tracemalloc
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.configs.limits import MOST, WORD_LENGTH
from toolkit.configs.option import spelled
from toolkit.engine.process.outage import RESTART_WINDOW, RESTARTS
from toolkit.serve.http import json_values
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.json_values import count_values
from toolkit.serve.http.limits import Limits, rows
from toolkit.serve.http.sharing.lanes import LARGE, Lanes
from toolkit.serve.openai import chat_routes

CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "echo", "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}

# limit -> (its value, route, a body at the limit, one beyond)
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "max_prompt_chars": (300, "text", {**TEXT, "prompt": ["x" * 150] * 2}, {**TEXT, "prompt": ["x" * 150, "x" * 151]}),
    "max_messages": (3, "chat", {**CHAT, "messages": CHAT["messages"] * 3}, {**CHAT, "messages": CHAT["messages"] * 4}),
    "max_choices": (6, "text", {**TEXT, "n": 6}, {**TEXT, "prompt": ["a"] * 4, "n": 2}),
    "max_total_tokens": (600, "text", {**TEXT, "max_tokens": 300, "n": 2}, {**TEXT, "max_tokens": 301, "n": 2}),
    "max_held_bytes": (
        35_000,
        "chat",
        {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 5, "max_tokens": 4},
        {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 5, "max_tokens": 5},
    ),
    "max_format_bytes": (
        60,
        "text",
        {**TEXT, "response_format": {"type": "regex_schema", "regex_schema": "a" * 9}},
        {**TEXT, "response_format": {"type": "regex_schema", "regex_schema": "a" * 90}},
    ),
    "max_kwargs_bytes": (
        20,
        "chat",
        {**CHAT, "chat_template_kwargs": {"shout": "x"}},
        {**CHAT, "chat_template_kwargs": {"shout": "x" * 30}},
    ),
    "max_tools": (2, "chat", CHAT, {**CHAT, "tools": [TOOL] * 3}),
    "max_tools_bytes": (120, "chat", CHAT, {**CHAT, "tools": [{**TOOL, "description": "x" * 100}]}),
    "max_values": (6000, "text", {**TEXT, "metadata": {"a": [1] * 5900}}, {**TEXT, "metadata": {"a": [12345] * 6000}}),
    "max_body_bytes": (500, "text", {**TEXT, "user": "x" * 400}, {**TEXT, "user": "x" * 500}),
}
HELD_ELSEWHERE = {
    "max_queue",
    "max_file_bytes",
    "max_files",
    "max_files_bytes",
    "file_seconds",
    "max_batches",
    "max_batch_lines",
    "batch_lines_at_once",
    "max_images",
    "max_image_bytes",
    "max_image_pixels",
    "max_decoding_bytes",
    "max_fetched_bytes",
    "max_prepared_bytes",
    "image_timeout",
    "max_video_bytes",
    "max_video_seconds",
    "max_video_frames",
    "max_stored_responses",
    "max_stored_bytes",
    "stored_response_seconds",
    "max_sessions",
    "session_timeout",
    "max_pending_bytes",
    "max_connections",
    "read_timeout",
    "write_timeout",
    "prompt_timeout",
    "engine_timeout",
}


@pytest.fixture
def ask(post: Any) -> Any:
    """``ask(app, path, body) -> (status, the answer's JSON)``; ``body``: JSON, or bytes as they are."""

    def run(app: Any, path: str, body: Any) -> tuple[int, Any]:
        status, answer = post(app, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        return status, json.loads(answer)

    return run


@pytest.fixture
def build(request: Any, tmp_path: Path) -> Any:
    """``build(**limits)``: the application with these limits."""
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))

    def make(**limits: Any) -> Any:
        engine = conftest.FakeEngine(conftest.ByteTokenizer(tmp_path))
        options = conftest.ServerSettings(model_name="echo", limits=Limits(**limits))
        return conftest.create_app(engine, conftest.PlainTemplate(), options)

    return make


@pytest.mark.parametrize("name", CASES)
def test_beyond_a_limit(build: Any, ask: Any, name: str) -> None:
    value, route, within, beyond = CASES[name]
    path = {"chat": "/v1/chat/completions", "text": "/v1/completions"}[route]
    app = build(**{name: value})
    status, reply = ask(app, path, within)
    assert status == 200, reply
    status, reply = ask(app, path, beyond)
    assert status in (400, 413), reply
    assert spelled(name) in reply["error"]["message"] and f"{value:,}" in reply["error"]["message"]
    assert reply["error"]["code"] in ("limit_exceeded", "body_too_large")


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/embeddings", "input", {}),
        ("/v1/rerank", "documents", {"query": "a"}),
        ("/v1/score", "text_2", {"text_1": "a"}),
    ],
)
def test_prompts_without_an_answer_are_limited_too(
    build: Any, ask: Any, path: str, field: str, body: dict[str, Any]
) -> None:
    for limits, value in (({"max_choices": 3}, ["a"] * 4), ({"max_prompt_chars": 30}, ["x" * 16] * 2)):
        request = {"model": "echo", **body, field: value}
        status, reply = ask(build(**limits), path, request)
        assert status == 400 and reply["error"]["param"] == field and reply["error"]["code"] == "limit_exceeded"


@pytest.mark.parametrize("body", [{"input": ["x" * 299]}, {"query": "q", "documents": ["x" * 299]}])
def test_tokens_of_texts_that_are_only_read_count_too(build: Any, ask: Any, body: dict[str, Any]) -> None:
    app = build(max_total_tokens=600)
    path, field = ("/v1/embeddings", "input") if "input" in body else ("/v1/rerank", "documents")
    method = {} if "input" in body else {"method": "embedding"}
    seen = app.state.server.engine.seen
    for count, expected in ((2, 200), (3, 400)):
        before = len(seen)
        request = {"model": "echo", **body, **method, field: body[field] * count}
        status, reply = ask(app, path, request)
        assert status == expected, reply
    assert "--max-total-tokens" in reply["error"]["message"] and len(seen) == before


def test_no_limit_is_left_out() -> None:
    assert {f.name for f in fields(Limits)} == CASES.keys() | HELD_ELSEWHERE


def test_prompts_that_are_only_scored_ask_for_no_tokens(build: Any, ask: Any) -> None:
    app = build(max_total_tokens=600)
    scored = {**TEXT, "prompt": ["ab"] * 3, "echo": True, "logprobs": 1}
    assert ask(app, "/v1/completions", {**scored, "max_tokens": 0})[0] == 200
    assert ask(app, "/v1/completions", scored)[0] == 400


def test_a_session_may_always_be_filled(build: Any, ask: Any) -> None:
    app = build(max_values=1, max_total_tokens=1)
    body = json.dumps({**TEXT, "prompt": [65] * 500, "max_tokens": 500}).encode()
    assert ask(app, "/v1/completions", body)[0] == 200


def test_the_documentation_has_the_same_table() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/limits.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(--[a-z-]+)` \| ([\d,.]+) \| (.+) \|$", text, re.MULTILINE)
    assert told == [tuple(row) for row in rows()]
    for most in (
        MOST["stop_words"],
        MOST["bad_words"],
        MOST["stop_token_ids"],
        MOST["logit_bias"],
        *WORD_LENGTH.values(),
    ):
        assert f"{most:,}" in text
    assert f"| `stop` | {MOST['stop_words']} strings of {WORD_LENGTH['stop_words']:,} characters |" in text
    assert f"{RESTARTS} times" in text and f"{RESTART_WINDOW / 60:.0f} minutes" in text


def test_other_pages_leave_the_lengths_of_lists_to_that_table() -> None:
    """Each fact once: what stands in two places differs some day."""
    for page in (Path(__file__).resolve().parents[2] / "docs").rglob("*.md"):
        for line in page.read_text(encoding="utf-8").splitlines():
            if page.name != "limits.md" and re.match(r"\| .*`(stop|stop_sequences|bad_words|logit_bias)`", line):
                assert not re.search(r"(up to|at most) [0-9]", line), f"{page.name}: {line}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet='ab,[]{}"\\\n\u00e9'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet=',[{"\\a'), inner),
    max_leaves=60,
)


def values_in(data: Any) -> int:
    if isinstance(data, dict):
        return 1 + sum(values_in(v) for v in data.values())
    return 1 + sum(values_in(v) for v in data) if isinstance(data, list) else 1


@given(data=JSON, size=st.integers(1, 40))
def test_values_are_counted_wherever_the_text_is_cut(data: Any, size: int) -> None:
    text = json.dumps(data, ensure_ascii=size % 2 == 0).encode()
    before, json_values.SLICE = json_values.SLICE, size
    try:
        found = count_values(text)
    finally:
        json_values.SLICE = before
    assert values_in(data) <= found <= 2 * values_in(data) + 1
    assert found == count_values(text)


def test_millions_of_numbers_are_never_built(build: Any, ask: Any) -> None:
    body = b'{"model": "echo", "prompt": [' + b",".join([b"7"] * 3_000_000) + b"]}"
    app = build()
    tracemalloc.start()
    status, reply = ask(app, "/v1/completions", body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert status == 413 and "--max-values" in reply["error"]["message"]
    assert peak < 8 * len(body), "a list of them takes more, and so does what pydantic makes of it"


def test_a_text_far_too_long_is_not_tokenized_to_its_end(build: Any, ask: Any) -> None:
    app = build()
    tokenizer = app.state.server.engine.tokenizer
    plain, seen = tokenizer.encode, []
    tokenizer.encode = lambda text, add_special_tokens=True: (seen.append(len(text)), plain(text))[1]
    for path, body in (("/v1/completions", {**TEXT, "prompt": "x" * 2_000_000}), ("/v1/chat/completions", CHAT)):
        if path.endswith("chat/completions"):
            body = {**body, "messages": "y" * 2_000_000}
        seen.clear()
        status, reply = ask(app, path, body)
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        assert 0 < sum(seen) < 20_000


def test_many_faults_are_told_in_one_line(build: Any, ask: Any) -> None:
    body = {**TEXT, **{f"field {i}": 1 for i in range(20_000)}}
    status, reply = ask(build(), "/v1/completions", body)
    assert status == 400 and "20,000" in reply["error"]["message"] and len(reply["error"]["message"]) < 200


@pytest.mark.parametrize("field", ["model", "stop", "response_format", "tools", "tool_choice", "seed"])
def test_what_is_told_of_a_huge_value_is_short(build: Any, ask: Any, field: str) -> None:
    for value in ("x" * 3_000_000, [["x" * 1000] * 500], {"x" * 1_000_000: 1}):
        status, reply = ask(build(), "/v1/chat/completions", {**CHAT, field: value})
        assert status in (400, 404) and len(reply["error"]["message"]) < 700


def test_large_work_does_not_wait_in_front_of_small() -> None:
    async def run() -> list[str]:
        lanes, order = Lanes(Limits()), []
        release = threading.Event()

        def large() -> None:
            release.wait(60)
            order.append("large")

        async def do(work: Any, size: int) -> None:
            await lanes.run(work, size)

        waiting = [asyncio.create_task(do(large, LARGE + 1)) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.gather(*(do(lambda: order.append("small"), 100) for _ in range(50)))
        release.set()
        await asyncio.gather(*waiting)
        return order

    order = asyncio.run(run())
    assert order == ["small"] * 50 + ["large"] * 20


def test_log_probabilities_of_a_prompt_are_not_laid_out_on_the_event_loop(
    build: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[threading.Thread] = []
    monkeypatch.setattr(chat_routes, "prompt_logprobs", lambda *_: where.append(threading.current_thread()) or [None])
    body = json.dumps({**CHAT, "prompt_logprobs": 2}).encode()
    status, reply = ask(build(), "/v1/chat/completions", body)
    assert status == 200 and reply["prompt_logprobs"] == [None]
    assert where and threading.current_thread() not in where


def test_work_has_a_deadline_and_who_only_waited_is_told_so() -> None:
    release = threading.Event()

    async def run() -> list[int]:
        lanes = Lanes(Limits(prompt_timeout=1.0))
        work = [lanes.run(lambda: release.wait(100), LARGE + 1) for _ in range(3)]
        found = await asyncio.gather(*work, return_exceptions=True)
        release.set()
        assert await lanes.run(lambda: 5, LARGE + 1) == 5, "what was given up never ran"
        return [error.status for error in found if isinstance(error, ApiError) and "--prompt-timeout" in error.message]

    started = time.monotonic()
    assert asyncio.run(run()) == [400, 503, 503]
    assert time.monotonic() - started < 60, "it waited for what it gave up"


@pytest.mark.parametrize("field", ["response_format", "tools", "chat_template_kwargs"])
@pytest.mark.parametrize("value", [10**40, -(1 << 63) - 1, [1e999], {"a": {"": 1 << 64}}])
def test_numbers_of_any_size_are_counted(field: str, value: Any) -> None:
    """Found by scripts/fuzzing/fuzz: an integer beyond 64 bits was a 500."""
    Limits().check_body({field: value})


SOURCE = {"type": "base64", "media_type": "image/png", "data": "x" * 200}


@pytest.mark.parametrize(
    ("part", "fits"),
    [
        ({"type": "image_url", "image_url": {"url": "x" * 200}}, True),
        ({"type": "input_image", "image_url": "x" * 200}, True),
        ({"type": "image", "source": SOURCE}, True),
        ({"type": "document", "source": {"type": "text", "data": "x" * 200}}, False),
        ({"type": "image", "source": {"type": "text", "data": "x" * 200}}, False),
        ({"type": "tool_use", "input": {"source": "x" * 200, "image_url": "y"}}, False),
        ({"type": "tool_result", "content": [{"type": "text", "text": "", "image_url": "x" * 200}]}, False),
    ],
    ids=lambda x: str(x)[:40],
)
def test_images_alone_are_no_characters(part: Any, fits: bool) -> None:
    limits, body = Limits(max_prompt_chars=100), {"messages": [{"role": "user", "content": [part]}]}
    if fits:
        limits.check_body(body)
    else:
        with pytest.raises(ApiError, match="max-prompt-chars"):
            limits.check_body(body)
