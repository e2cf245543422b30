"""A stand-in for the engine: it answers each prompt with that prompt, byte by byte, on a clock.

It keeps the contract of AsyncEngine's methods that the server uses, so the server's own work (fields, envelopes,
streams, disconnects) is tested fast and without a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn

from toolkit.chat.template import ChatTemplate
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.process.outage import Outage
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.serve.app import create_app
from toolkit.serve.http.connection import connection_class
from toolkit.serve.options import ServerSettings

EOS = 256


class ByteTokenizer:
    """One token a byte, and an end token."""

    vocab_size = 257
    special_ids = frozenset({EOS})
    byte_exact = True
    strips_leading_space = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chat_templates: dict[str, str] = {}

    def token_id(self, text: str) -> int | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_beginning(self, text: str, most: int) -> list[int]:
        return self.encode(text)[:most]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>"


class PlainTemplate:
    source = "{{ messages }}"
    tool_format: Any = None
    reasoning_format: Any = None

    def with_stops(self, config: GenerationConfig) -> GenerationConfig:
        return replace(config, stop_words=[*(config.stop_words or []), "<end>"])

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        if unknown := set(kwargs) - {"shout", "enable_thinking", "tools"}:
            raise UsageError(f"chat_template_kwargs: unknown {unknown}")
        text = "".join(f"[{m['role']}]{self.join(m.get('content', ''))}" for m in messages)
        return text.upper() if kwargs.get("shout") else text

    def join(self, content: Any) -> str:
        return content if isinstance(content, str) else "".join(part["text"] for part in content)


@dataclass
class FakeWeights:
    running: dict[str, bool]  # the engine's
    asleep: bool = False
    empty: bool = False
    updates: list[tuple[set[str], str]] = field(default_factory=list)  # names of tensors, and mode

    def sleep(self) -> None:
        assert not self.running
        self.asleep = True

    def wake(self, parts: Any) -> None:
        self.asleep = "kv_cache" not in parts

    def update(self, files: Any, mode: str) -> None:
        self.updates.append((set(files.names), mode))
        if "wrong" in files.names:
            files.close()
            raise ToolkitError("update_weights: tensor wrong: expected none")
        files.close()


@dataclass
class FakeEngine:
    tokenizer: ByteTokenizer
    delay: float = 0.0
    held: bool = False  # no token comes until it is let go
    session_len: int = 512
    max_batch_size: int = 128
    model_name: str = "echo"
    outage: Outage | None = None
    runner_why: str = ""
    runner_note: str = ""
    fail_after: int | None = None
    fail_code: int | None = None
    seen: list[tuple[list[int], GenerationConfig]] = field(default_factory=list)
    running: dict[str, bool] = field(default_factory=dict)  # id -> aborted?
    aborted: set[str] = field(default_factory=set)  # every id that abort() was called for
    most_running: int = 0
    adapters: list[str | None] = field(default_factory=list)  # of each request
    priorities: list[int] = field(default_factory=list)  # likewise
    whose: list[Any] = field(default_factory=list)  # likewise
    salts: list[str] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)  # likewise
    predicted: list[list[int]] = field(default_factory=list)  # likewise
    rooms: list[int] = field(default_factory=list)  # likewise
    ended_sessions: list[str] = field(default_factory=list)
    blind: bool = False
    plan: Any = field(
        default_factory=lambda: SimpleNamespace(total=1 << 20, longer=lambda *names: " ".join((*names, "raise it")))
    )

    def __post_init__(self) -> None:
        self.weights = FakeWeights(self.running)

    def stats(self) -> dict[str, float]:
        return {"running": len(self.running), "waiting": 0, "kv_usage": 0.25, "preemptions": 2}

    def end_session(self, name: str) -> None:
        self.ended_sessions.append(name)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        if request_id in self.running:
            self.running[request_id] = True

    async def generate(
        self,
        token_ids: list[int],
        gen_config: GenerationConfig,
        *,
        request_id: str | None = None,
        session: str | None = None,
        adapter: str | None = None,
        only: str | None = None,
        priority: int = 0,
        pictures: Sequence[Any] = (),
        progress: bool = False,
        whose: Any = None,
        prediction: Sequence[int] = (),
        second: int = 0,
        room: int = 0,
        salt: str = "",
    ) -> AsyncIterator[Response]:
        assert request_id is not None and request_id not in self.running
        self.adapters.append(adapter)
        self.predicted.append(list(prediction))
        self.priorities.append(priority)
        self.whose.append(whose)
        self.salts.append(salt)
        self.sessions.append(session)
        self.rooms.append(room)
        self.seen.append((token_ids, gen_config))
        self.running[request_id] = False
        self.most_running = max(self.most_running, len(self.running))
        try:
            if only is not None:
                scores = [None, *({t: -0.25} for t in token_ids[1:])]
                whole = Response(finish_reason="length", input_token_len=len(token_ids))
                if only == "score":
                    whole.prompt_logprobs = scores
                else:
                    whole.last_hidden_state = np.ones((1, 4), np.float32)
                yield whole
                return
            limit = gen_config.max_new_tokens or len(token_ids)
            answer = token_ids[:limit]
            for i, token in enumerate(answer):
                await asyncio.sleep(self.delay)
                while self.held and not self.running[request_id]:
                    await asyncio.sleep(0.005)
                last = i == len(answer) - 1
                if self.fail_after == i:
                    told: Any = {"error_message": "the runner broke", "error_code": self.fail_code}
                    yield Response(finish_reason="error", generate_token_len=i, **told)
                    return
                if self.running[request_id]:
                    yield Response(finish_reason="abort", generate_token_len=i)
                    return
                reply = Response(
                    text=chr(token),
                    token_ids=[token],
                    generate_token_len=i + 1,
                    input_token_len=len(token_ids),
                    cached_tokens=3,
                    accepted_tokens=min(i, len(prediction)),
                    rejected_tokens=1 if prediction else 0,
                    finish_reason=("length" if limit < len(token_ids) else "stop") if last else None,
                )
                if gen_config.logprobs is not None:
                    others = gen_config.logit_bias or range(gen_config.logprobs)
                    reply.logprobs = [{token: -0.5, **{o: -1.0 - o for o in others if o != token}}]
                if i == 0 and gen_config.prompt_logprobs is not None:
                    reply.prompt_logprobs = [None, *({t: -0.25} for t in token_ids[1:])]
                yield reply
        finally:
            del self.running[request_id]


@dataclass
class Running:
    """A server on a real port. ``url`` has no trailing slash."""

    url: str
    engine: FakeEngine
    app: Any
    server_state: Any  # uvicorn's: connections, tasks

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def wait(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, "the condition never came true"
            time.sleep(0.005)


@contextlib.contextmanager
def running(app: Any, engine: Any, keep_alive: int = 60, certificate: Path | None = None) -> Iterator[Running]:
    """``keep_alive``: seconds that a connection may rest; long, for clients use one again after any pause.
    ``certificate``: of a server over TLS."""
    sock = socket.create_server(("127.0.0.1", 0))
    http = connection_class(app.state.server.settings.limits)
    config = uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=keep_alive,
        http=http,
        ssl_certfile=certificate,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    try:
        yield Running(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, app, server.server_state)
    finally:
        server.should_exit = True
        thread.join(60)
        sock.close()
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def packed(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as the native runner takes it, in float32: its server and engine start without torch."""
    path = tmp_path_factory.mktemp("packed") / "model"
    convert(str(tiny_models("llama")), path, Packing(target="cpu", dtype="float32", head_bits=16), quiet=True)
    return path


@pytest.fixture(scope="session")
def post(support: Any) -> Any:
    """``post(app, path, body) -> (status, body)``: a request straight into an application."""
    return lambda app, path, body: asyncio.run(support("asgi").post(app, path, body))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """``start(engine={…}, **settings) -> Running``: a server around a fake engine."""
    with contextlib.ExitStack() as stack:

        def begin(
            engine: dict[str, Any] | None = None,
            template: Any = None,
            keep_alive: int = 60,
            certificate: Path | None = None,
            **settings: Any,
        ) -> Running:
            fake = FakeEngine(ByteTokenizer(tmp_path), **(engine or {}))
            app = create_app(fake, template or PlainTemplate(), ServerSettings(model_name="echo", **settings))  # type: ignore[arg-type]
            return stack.enter_context(running(app, fake, keep_alive, certificate))

        yield begin


@pytest.fixture(scope="session")
def serve_tiny() -> Any:
    """``with serve_tiny(model, config, **settings) as (server, engine, template)``: a server of a real engine, whose
    model is called "tiny"."""

    @contextlib.contextmanager
    def begin(model: Path, config: Any, **settings: Any) -> Iterator[tuple[Running, AsyncEngine, ChatTemplate]]:
        with AsyncEngine.open(model, backend_config=config) as engine:
            template = ChatTemplate.open(engine.tokenizer, engine.tokenizer.path)
            app = create_app(engine, template, ServerSettings(model_name="tiny", **settings))
            with running(app, engine) as server:
                yield server, engine, template

    return begin


@pytest.fixture
def server_on() -> Any:
    """``with server_on(engine, **settings) as server``: a server of an engine that is open."""

    def begin(engine: Any, **settings: Any) -> contextlib.AbstractContextManager[Running]:
        app = create_app(engine, PlainTemplate(), ServerSettings(model_name="echo", **settings))  # type: ignore[arg-type]
        return running(app, engine)

    return begin
