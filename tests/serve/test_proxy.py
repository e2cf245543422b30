"""The proxy in front of small fake nodes: spreading, streaming, retrying, and what the death of a node costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn

from toolkit.errors import ToolkitError, UsageError
from toolkit.serve import announce
from toolkit.serve.announce import Announcement
from toolkit.serve.http.connection import connection_class
from toolkit.serve.http.errors import ApiError
from toolkit.serve.options import ProxySettings
from toolkit.serve.proxy import ask as asking
from toolkit.serve.proxy import nodes as nodes_module
from toolkit.serve.proxy import strategies
from toolkit.serve.proxy import watch as watching
from toolkit.serve.proxy.app import create_app
from toolkit.serve.proxy.nodes import UNSEEN, Node, Nodes, checked
from toolkit.serve.proxy.state import ProxyState


@dataclass
class FakeNode:
    """Answers like a server; ``status``: of every POST; ``tokens`` and ``delay``: of a stream; ``die_at``: the piece
    before which it drops the connection; ``raw``: what it says to a path, and ``again`` for ever after."""

    models: tuple[str, ...] = ("m",)
    status: int = 200
    tokens: int = 5
    delay: float = 0.001
    die_at: int | None = None
    healthy: bool = True
    go_on: asyncio.Semaphore | None = None  # where there is one, an answer or a piece of a stream takes one of it
    raw: dict[str, bytes] = field(default_factory=dict)
    again: bytes = b""
    sent: int = 0  # bytes of ``again``
    streaming: int = 0
    seen: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, port: int = 0) -> FakeNode:
        self.server = await asyncio.start_server(self.handle, "127.0.0.1", port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def kill(self) -> None:
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()

    @property
    def posts(self) -> list[Any]:
        return [body for path, _, body in self.seen if path.startswith("/v1/") and body is not None]

    @property
    def asked(self) -> list[tuple[str, dict[str, str], Any]]:
        """What it has seen but for heartbeats, which come at any moment."""
        return [seen for seen in self.seen if seen[0] not in ("/health", "/v1/models")]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.server.is_serving():  # it was killed while this connection waited for its turn
            return writer.transport.abort()
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self.one(reader, writer):
                pass
        self.writers.discard(writer)
        writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split()[1]
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        data = json.loads(body) if body else None
        self.seen.append((path, headers, data))
        if path in self.raw:
            return await self.odd(writer, self.raw[path])
        if path == "/health":
            self.whole(writer, 200 if self.healthy else 503, {"status": "ok"})
        elif path == "/v1/models":
            self.whole(writer, 200, {"data": [{"id": name} for name in self.models]})
        elif data is None:
            self.whole(writer, 200, {})
        elif self.status != 200:
            self.whole(writer, self.status, {"error": {"message": "no"}})
        elif not data.get("stream"):
            await self.pause()
            self.whole(writer, 200, {"node": self.port})
        else:
            self.streaming += 1
            try:
                return await self.stream(writer)
            finally:
                self.streaming -= 1
        await writer.drain()
        return True

    async def odd(self, writer: asyncio.StreamWriter, said: bytes) -> bool:
        writer.write(said)
        while self.again:
            writer.write(self.again)
            await writer.drain()
            self.sent += len(self.again)
            await asyncio.sleep(self.delay)
        await writer.drain()
        return True

    async def pause(self) -> None:
        await (self.go_on.acquire() if self.go_on is not None else asyncio.sleep(self.delay))

    def whole(self, writer: asyncio.StreamWriter, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += "date: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: node\r\n\r\n"
        writer.write(head.encode() + body)

    async def stream(self, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i in range(self.tokens):
            if i == self.die_at:
                writer.transport.abort()
                return False
            piece = f"data: {self.port} {i}\n\n".encode()
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await self.pause()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True


@dataclass
class World:
    """A proxy, its nodes, and a client of it."""

    nodes: list[FakeNode]
    state: Any
    client: httpx.AsyncClient

    async def up(self, count: int) -> None:
        """Wait until so many nodes get requests."""
        async with asyncio.timeout(60):
            while sum(node.down is None for node in self.state.nodes) != count:
                await asyncio.sleep(0.01)

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "m", "prompt": "hi", **fields})


@contextlib.asynccontextmanager
async def world(*nodes: FakeNode, headers: Any = None, **settings: Any) -> AsyncIterator[World]:
    for node in nodes:
        await node.start()
    settings = {"node": [node.url for node in nodes], "heartbeat": 0.2, **settings}
    app = create_app(ProxySettings(**settings))
    state = app.state.server
    config = uvicorn.Config(
        app, port=0, log_config=None, lifespan="off", http=connection_class(state.settings.limits),
        timeout_graceful_shutdown=1, timeout_keep_alive=60,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    tasks = [asyncio.create_task(server.serve()), asyncio.create_task(watching.watch(state))]
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            found = World(list(nodes), state, client)
            await found.up(len(settings["node"]))
            yield found
    finally:
        for node in nodes:
            node.kill()
        tasks[1].cancel()
        server.should_exit = True
        await asyncio.wait(tasks, timeout=60)
        await state.http.aclose()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))


def test_requests_are_spread_and_streams_pass_through() -> None:
    async def go() -> None:
        async with world(*(FakeNode(go_on=asyncio.Semaphore(0)) for _ in range(3))) as w:
            asked = [asyncio.create_task(w.ask()) for _ in range(30)]
            async with asyncio.timeout(60):
                while sum(len(node.posts) for node in w.nodes) < 30:
                    await asyncio.sleep(0.01)
            assert all(len(node.posts) == 10 for node in w.nodes)  # each was the least busy ten times
            for node in w.nodes:
                for _ in range(10):
                    node.go_on.release()
                node.go_on = None
            assert {r.status_code for r in await asyncio.gather(*asked)} == {200}
            streamed = await w.ask(stream=True)
            lines = [line for line in streamed.text.split("\n\n") if line]
            assert [line.split()[-1] for line in lines] == ["0", "1", "2", "3", "4", "[DONE]"]
            assert streamed.headers["content-type"] == "text/event-stream"
            models = (await w.client.get("/v1/models")).json()
            assert [card["id"] for card in models["data"]] == ["m"]
            assert (await w.client.get("/health")).json() == {"status": "healthy", "nodes": 3, "proxies": [w.state.id]}
            tags = (await w.client.get("/api/tags")).json()
            assert [model["name"] for model in tags["models"]] == ["m"]
            chat = await w.client.post(
                "/api/chat", json={"model": "m:latest", "messages": []}
            )  # as Ollama's clients ask
            assert chat.status_code == 200 and "node" in chat.json()
            assert (await w.client.post("/completion", json={"prompt": "a"})).status_code == 200

    run(go)


def test_a_model_whose_own_name_ends_as_ollama_s_do() -> None:
    async def go() -> None:
        async with world(FakeNode(models=("x:latest",))) as w:
            for path in ("/api/chat", "/api/show", "/v1/chat/completions"):
                assert (await w.client.post(path, json={"model": "x:latest", "messages": []})).status_code == 200
            assert (await w.client.post("/api/chat", json={"model": "x", "messages": []})).status_code == 404

    run(go)


def test_what_a_model_is_tells_a_node_that_serves_it() -> None:
    async def go() -> None:
        async with world(FakeNode(), FakeNode(models=("n",))) as w:
            for _ in range(4):
                assert (await w.client.get("/v1/models/n")).status_code == 200
            assert [len(node.asked) for node in w.nodes] == [0, 4]
            unknown = await w.client.get("/v1/models/x")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")

    run(go)


def test_pieces_arrive_as_they_come() -> None:
    async def go() -> None:
        go_on, seen = asyncio.Semaphore(0), 0
        async with world(FakeNode(go_on=go_on)) as w:
            body = {"model": "m", "prompt": "a", "stream": True}
            async with asyncio.timeout(60), w.client.stream("POST", "/v1/completions", json=body) as reply:
                async for _ in reply.aiter_raw():
                    seen += 1
                    go_on.release()  # the node sends a piece when the one before has come
            assert seen >= 6

    run(go)


def test_killing_a_node_under_load_loses_only_what_it_was_sending() -> None:
    """30 clients keep asking; one of three nodes dies; every later request is answered by the others."""

    async def go() -> None:
        victim = FakeNode(tokens=1 << 20, delay=0.005)  # none of its streams ends before it does
        async with world(victim, *(FakeNode(tokens=20, delay=0.005) for _ in range(2))) as w:
            told: list[tuple[bool, str]] = []  # (complete, text)
            begun: set[asyncio.Task[None] | None] = set()  # clients that read a stream of the victim's
            stop = asyncio.Event()

            async def client() -> None:
                while not stop.is_set():
                    text = ""
                    body = {"model": "m", "prompt": "a", "stream": True}
                    async with w.client.stream("POST", "/v1/completions", json=body) as reply:
                        assert reply.status_code == 200
                        async for piece in reply.aiter_text():
                            text += piece
                            if f"data: {victim.port} " in text:
                                begun.add(asyncio.current_task())
                    told.append((text.endswith("data: [DONE]\n\n"), text))

            clients = [asyncio.create_task(client()) for _ in range(30)]
            async with asyncio.timeout(60):
                while len(begun) < 3:
                    await asyncio.sleep(0.001)
            lost, before = victim.streaming, len(told)
            victim.kill()
            async with asyncio.timeout(60):
                while len(told) < before + 60:
                    await asyncio.sleep(0.01)
            stop.set()
            await asyncio.gather(*clients)
            broken = [text for complete, text in told if not complete]
            assert len(begun) <= len(broken) <= lost
            for text in broken:
                assert {int(port) for port in re.findall(r"data: (\d+)", text)} == {victim.port}
                error = json.loads(text.split("data: ")[-1])["error"]
                assert error["code"] == "node_lost"
            later = [text for _, text in told[-20:]]
            assert all(str(victim.port) not in text for text in later)
            status = (await w.client.get("/nodes/status")).json()
            assert [s["healthy"] for s in status.values()] == [False, True, True]

    run(go)


def test_a_stream_that_breaks_off_ends_as_its_api_tells_errors() -> None:
    """Anthropic's clients step over an event that is not called an error."""

    async def go() -> None:
        async with world(FakeNode(die_at=2)) as w:
            reply = await w.client.post("/v1/messages", json={"model": "m", "stream": True})
            named, data = reply.text.split("\n")[-4:-2]
            told = json.loads(data.removeprefix("data: "))
            assert (named, told["type"]) == ("event: error", "error")
            assert told["error"]["message"].startswith("the node that sent this answer is gone")

    run(go)


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 502}, {"status": 429}, {"die_at": 0}])
def test_a_request_goes_to_another_node_before_the_first_byte(fault: dict[str, Any]) -> None:
    async def go() -> None:
        bad, good = FakeNode(**fault), FakeNode()
        async with world(bad, good, strategy="prefix_cache_aware") as w:
            for _ in range(4):
                reply = await w.ask(stream=True, prompt="the same")
                assert reply.status_code == 200 and reply.text.endswith("[DONE]\n\n")
            assert len(good.posts) == 4 and len(bad.posts) <= 4

    run(go)


@pytest.mark.parametrize(("code", "stays"), [("prompt_timeout", True), ("engine_unavailable", False)])
def test_a_node_stays_unless_its_503_is_of_all_requests(code: str, stays: bool) -> None:
    async def go() -> None:
        bad, good = FakeNode(), FakeNode()
        error = ApiError(503, "no", code=code)
        head = "".join(f"{name}: {value}\r\n" for name, value in (error.headers or {}).items())
        bad.raw["/v1/completions"] = f"HTTP/1.1 503 X\r\n{head}content-length: 0\r\n\r\n".encode()
        async with world(bad, good, heartbeat=1000.0) as w:
            while not bad.posts:
                assert (await w.ask()).status_code == 200
            assert (w.state.nodes.find(bad.url).failures == 0) is stays

    run(go)


def test_what_a_node_answers_itself_is_not_asked_again() -> None:
    """400 and 500 are the request's own; nothing is retried that may have been at fault for it."""

    async def go() -> None:
        nodes = [FakeNode(status=400), FakeNode(status=400)]
        async with world(*nodes) as w:
            assert (await w.ask()).status_code == 400
            assert sum(len(n.posts) for n in nodes) == 1

    run(go)


def test_a_request_that_ends_its_node_ends_two_at_most() -> None:
    async def go() -> None:
        nodes = [FakeNode(die_at=0) for _ in range(4)]
        async with world(*nodes) as w:
            reply = await w.ask(stream=True)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "no_node"
            assert sum(len(n.posts) for n in nodes) == 2

    run(go)


def test_a_client_that_leaves_ends_its_request_at_the_node() -> None:
    async def go() -> None:
        async with world(FakeNode(tokens=1000, delay=0.01)) as w:
            body = {"model": "m", "prompt": "a", "stream": True}
            async with w.client.stream("POST", "/v1/completions", json=body) as reply:
                await anext(reply.aiter_raw())
                node = w.state.nodes.find(w.nodes[0].url)
                assert node.unfinished == 1
            async with asyncio.timeout(60):
                while node.unfinished or w.nodes[0].streaming:
                    await asyncio.sleep(0.01)
            assert node.down is None

    run(go)


def test_a_node_that_comes_back_gets_requests_again() -> None:
    async def go() -> None:
        node = FakeNode()
        async with world(node) as w:
            node.kill()
            assert (await w.ask()).status_code == 503
            assert (await w.client.get("/health")).status_code == 503
            again = await FakeNode().start(node.port)
            await w.up(1)
            assert (await w.ask()).status_code == 200
            again.healthy = False
            await w.up(0)
            again.kill()

    run(go)


def test_a_node_that_never_answers_is_told_of_once(caplog: Any) -> None:
    async def go() -> None:
        state = ProxyState(ProxySettings(node=["http://127.0.0.1:9"]))
        for _ in range(2):
            await watching.look(state, next(iter(state.nodes)))
        assert [record.message.partition(": gets")[0] for record in caplog.records] == ["http://127.0.0.1:9"]

    run(go)


def engine_info(role: str, engine_id: str = "e" * 32, address: str = "0.0.0.0:9") -> bytes:
    info = {"engine_id": engine_id, "address": address, "tls": False, "in_common": {}}
    body = json.dumps({"role": role, "engine_id": engine_id, "endpoint_info": json.dumps(info)})
    return plain_reply(body)


def plain_reply(body: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def takes_over(engine_id: str = "e" * 32) -> dict[str, bytes]:
    """What a node answers that takes blocks of any other."""
    linked = plain_reply('{"status": 1}')
    return {"/distserve/engine_info": engine_info("Decode", engine_id), "/distserve/p2p_connect": linked}


def test_prompts_go_to_one_node_and_answers_come_from_another() -> None:
    async def test() -> None:
        linked = takes_over()
        lends, takes = FakeNode(raw={"/distserve/engine_info": engine_info("Prefill")}), FakeNode(raw=linked)
        settings = {"serving_strategy": "DistServe", "prefill_min_bytes": 200}
        async with world(lends, takes, **settings) as w:
            mine = {"x-toolkit-kv": '{"lend": true}'}
            long = {"model": "m", "prompt": "x" * 300}
            for body in (long, {**long, "stream": True}, long):
                reply = await w.client.post("/v1/completions", json=body, headers=mine)
                assert reply.status_code == 200
            assert [h["x-toolkit-kv"] for p, h, _ in lends.asked if p == "/v1/completions"] == [
                '{"lend":true,"source":""}'
            ] * 3
            told = [h["x-toolkit-kv"] for p, h, _ in takes.asked if p == "/v1/completions"]
            assert told == [json.dumps({"lend": False, "source": "e" * 32}, separators=(",", ":"))] * 3
            ((_, _, link),) = [seen for seen in takes.asked if seen[0] == "/distserve/p2p_connect"]
            (end,) = link["remote_kvtransfer_endpoint_info"]
            assert json.loads(end["endpoint_info"])["address"] == "127.0.0.1:9"  # as the proxy reaches that node
            for body in ({"model": "m", "prompt": "short"}, {**long, "echo": True}):
                assert (await w.client.post("/v1/completions", json=body, headers=mine)).status_code == 200
            assert len(lends.posts) == 3 and len(takes.posts) == 5
            assert "x-toolkit-kv" not in [seen for seen in takes.asked if seen[0] == "/v1/completions"][-1][1]

    run(test)


def test_what_is_lent_goes_to_a_node_that_takes_it() -> None:
    """A node without a role would compute the prompt once more; it does where no other is left."""

    async def test() -> None:
        linked = takes_over()
        lends, takes = FakeNode(raw={"/distserve/engine_info": engine_info("Prefill")}), FakeNode(raw=linked)
        plain = FakeNode(raw={"/distserve/engine_info": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"})
        settings = {"serving_strategy": "DistServe", "prefill_min_bytes": 200}
        async with world(lends, plain, takes, **settings) as w:
            for _ in range(4):
                await w.client.post("/v1/completions", json={"model": "m", "prompt": "x" * 300})
            assert (len(lends.posts), len(takes.posts), len(plain.posts)) == (4, 4, 0)
            linked["/v1/completions"] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
            reply = await w.client.post("/v1/completions", json={"model": "m", "prompt": "x" * 300})
            assert reply.status_code == 200 and len(plain.posts) == 1

    run(test)


def test_a_node_that_starts_anew_is_told_again_from_whom_it_takes() -> None:
    async def test() -> None:
        linked = takes_over("d" * 32)
        lends, takes = FakeNode(raw={"/distserve/engine_info": engine_info("Prefill")}), FakeNode(raw=linked)
        async with world(lends, takes, serving_strategy="DistServe", prefill_min_bytes=0) as w:
            for started in ("d", "f"):
                linked["/distserve/engine_info"] = engine_info("Decode", started * 32)
                before = len(takes.asked)
                while len(takes.asked) < before + 2:  # it has been looked at
                    await asyncio.sleep(0.01)
                for _ in range(2):
                    assert (await w.ask()).status_code == 200
            links = [path for path, _, _ in takes.asked if path == "/distserve/p2p_connect"]
            assert len(links) == 2

    run(test)


def test_an_engine_that_ends_while_it_is_connected_costs_no_answer() -> None:
    async def test() -> None:
        told = {"/distserve/engine_info": engine_info("Decode")}  # it never answers how it was connected
        lends, takes = FakeNode(raw={"/distserve/engine_info": engine_info("Prefill", "a" * 32)}), FakeNode(raw=told)
        async with world(lends, takes, serving_strategy="DistServe", prefill_min_bytes=0) as w:
            told["/distserve/p2p_connect"] = b""
            work = asyncio.create_task(w.ask())
            while not any(path == "/distserve/p2p_connect" for path, _, _ in takes.asked):
                await asyncio.sleep(0.01)
            lends.raw["/distserve/engine_info"] = engine_info("Prefill", "b" * 32)
            node = w.state.nodes.find(lends.url)
            while node.lends.engine_id != "b" * 32:
                await asyncio.sleep(0.01)
            told["/distserve/p2p_connect"] = plain_reply('{"status": 1}')
            for writer in list(takes.writers):
                writer.transport.abort()
            assert (await work).status_code == 200

    run(test)


def test_a_prefill_node_that_stands_still_is_left() -> None:
    async def test() -> None:
        lends = FakeNode(raw={"/distserve/engine_info": engine_info("Prefill")}, go_on=asyncio.Semaphore(0))
        takes = FakeNode(raw={"/distserve/engine_info": engine_info("Decode")})
        async with world(lends, takes, serving_strategy="DistServe", prefill_min_bytes=0) as w:
            work = asyncio.create_task(w.ask())
            while not lends.posts:
                await asyncio.sleep(0.01)
            lends.healthy = False
            reply = await work
            assert reply.json() == {"node": takes.port}
            assert 'how="alone"} 1.0' in w.state.metrics.render().decode()

    run(test)


@pytest.mark.parametrize(
    "said", ["[]", "{}", '{"role": "Prefill"}', '{"role": 5, "engine_id": "e", "endpoint_info": "{}"}']
)
def test_a_node_that_says_nonsense_of_its_role_gets_no_requests(said: str) -> None:
    async def test() -> None:
        odd = FakeNode(raw={"/distserve/engine_info": plain_reply(said)})
        good = FakeNode(raw={"/distserve/engine_info": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"})
        await odd.start()
        async with world(good, serving_strategy="DistServe") as w:
            w.state.nodes.add(odd.url)
            while odd.url not in {n.url for n in w.state.nodes if n.down and "engine_info" in n.down}:
                await asyncio.sleep(0.01)
            assert (await w.ask()).json() == {"node": good.port}
            odd.kill()

    run(test)


def test_nodes_are_added_removed_and_ended() -> None:
    async def go() -> None:
        late = await FakeNode(models=("late",)).start()
        async with world(FakeNode(), allow_nodes_by_client=True, headers={"Content-Type": "application/json"}) as w:
            assert (await w.ask(model="late")).status_code == 404
            added = await w.client.post("/nodes/add", json={"url": late.url + "/", "status": {"speed": 3}})
            assert added.status_code == 200 and added.json()["speed"] == 3
            await w.up(2)
            assert (await w.ask(model="late")).json()["node"] == late.port
            status = (await w.client.get("/nodes/status")).json()[late.url]
            assert status["models"] == ["late"] and status["unfinished"] == 0 and len(status["latency"]) == 1
            gone = await w.client.post(f"/nodes/terminate?node_url={late.url}")
            assert gone.json() == {late.url: "ended"} and late.asked[-1][0] == "/terminate"
            assert (await w.client.post(f"/nodes/remove?node_url={late.url}")).status_code == 404
            assert (await w.client.post(f"/nodes/remove?node_url={w.nodes[0].url}")).status_code == 200
            assert (await w.ask()).status_code == 503
            late.kill()

    run(go)


def test_a_server_of_lmdeploy_s_joins() -> None:
    """What ``lmdeploy serve api_server --proxy-url`` sends: its role is a number."""

    async def go() -> None:
        async with world(allow_nodes_by_client=True) as w:
            node = await FakeNode(models=("internlm",)).start()
            body = {"url": node.url, "status": {"models": ["internlm"], "role": 1}}
            added = await w.client.post("/nodes/add", json=body)
            assert added.status_code == 200 and added.json()["healthy"], added.text
            assert (await w.ask(model="internlm")).json() == {"node": node.port}
            node.kill()

    run(go)


def test_a_node_that_is_removed_leaves_no_metrics() -> None:
    """Nor does what it was answering meanwhile: others come at other addresses."""

    async def go() -> None:
        gate = asyncio.Semaphore(0)
        nodes = [FakeNode(), FakeNode(models=("late",), go_on=gate)]
        async with world(*nodes, allow_nodes_by_client=True, headers={"Content-Type": "application/json"}) as w:
            url = w.nodes[1].url
            await w.ask()
            gate.release()
            await w.ask(model="late")
            w.nodes[1].status = 400
            await w.ask(model="late")
            w.nodes[1].status = 200
            assert len(re.findall(rf'proxy:requests_total{{node="{url}"', (await w.client.get("/metrics")).text)) == 2
            last = asyncio.create_task(w.ask(model="late"))
            while len(w.nodes[1].posts) < 3:
                await asyncio.sleep(0.01)
            assert (await w.client.post(f"/nodes/remove?node_url={url}")).status_code == 200
            gate.release()
            assert (await last).status_code == 200
            text = (await w.client.get("/metrics")).text
            assert url not in text and f'request_seconds_count{{node="{w.nodes[0].url}"}} 1.0' in text

    run(go)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"url": "file:///etc/passwd"},
        {"url": "http://user@host:1"},
        {"url": "http://host/path"},
        {"url": "http://a b:1"},
        {"url": "http://[v1.x]:1"},
        {"url": "http://h:1", "status": {"speed": 0}},
        {"url": "http://h:1", "lease": -1},
        {"url": 5},
        {"url": "http://h:1", "other": 1},
    ],
)
def test_a_node_that_cannot_be_is_refused(body: dict[str, Any]) -> None:
    async def go() -> None:
        async with world(allow_nodes_by_client=True) as w:
            reply = await w.client.post("/nodes/add", json=body)
            assert reply.status_code == 400 and not list(w.state.nodes)

    run(go)


def test_headers_of_one_connection_go_no_further() -> None:
    """Those that Connection names, of requests and answers; a body's type stays."""

    async def go() -> None:
        node = FakeNode()
        said = b"Connection: close, X-Hop\r\nX-Hop: 1\r\nX-Kept: 1\r\nContent-Length: 2\r\n\r\n{}"
        node.raw["/v1/completions"] = b"HTTP/1.1 200 OK\r\n" + said
        async with world(node, api_keys=["client"], node_key="inner") as w:
            named = "X-Private, x-toolkit-user,content-type , authorization"
            headers = {"Connection": named, "X-Private": "1", "X-Plain": "1", "Authorization": "Bearer client"}
            reply = await w.client.post("/v1/completions", json={"model": "m"}, headers=headers)
            sent = node.asked[-1][1]
            assert reply.status_code == 200 and "x-private" not in sent and sent["x-plain"] == "1"
            assert sent["authorization"] == "Bearer inner" and sent["content-type"] == "application/json"
            assert json.loads(sent["x-toolkit-user"])["name"].startswith("key-")
            assert "x-hop" not in reply.headers and reply.headers["x-kept"] == "1"

    run(go)


def test_only_the_operator_changes_nodes() -> None:
    """Keys of clients do not open /nodes/* where it has its own; the node's key replaces the client's."""

    async def go() -> None:
        node = FakeNode()
        client, operator = ({"Authorization": f"Bearer {key}"} for key in ("client", "operator"))
        async with world(node, api_keys=["client"], node_keys=["operator"], node_key="inner") as w:
            assert (await w.ask()).status_code == 401
            reply = await w.client.post("/v1/completions", json={"model": "m"}, headers=client)
            sent = node.asked[-1][1]
            assert reply.status_code == 200 and sent["authorization"] == "Bearer inner"
            assert sent["x-request-id"] == reply.headers["x-request-id"]
            assert json.loads(sent["x-toolkit-user"])["name"].startswith("key-")
            forged = {"x-api-key": "client", "x-toolkit-user": '{"id": "x", "owner": "somebody else"}'}
            assert (await w.client.post("/v1/completions", json={"model": "m"}, headers=forged)).status_code == 200
            other = node.asked[-1][1]
            first, second = (json.loads(s["x-toolkit-user"]) for s in (sent, other))
            assert (second["id"], second["name"]) == (first["id"], first["name"]) and "x-api-key" not in other
            assert second["owner"].startswith(first["owner"] + ".") and "somebody" not in second["owner"]
            for headers, status in ((client, 401), (operator, 200)):
                assert (await w.client.get("/nodes/status", headers=headers)).status_code == status
            assert (await w.client.get("/v1/models", headers=operator)).status_code == 401
        async with world(FakeNode(), api_keys=["client"]) as w:
            assert (await w.client.get("/nodes/status")).status_code == 401
            for path in ("/health", "/v1/health"):  # open to be read; nothing is passed on
                assert (await w.client.get(path)).status_code == 200
                assert (await w.client.post(path, json={"model": "m"})).status_code == 401
            assert (await w.client.get("/nodes/status", headers=client)).status_code == 200

    run(go)


CHANGES = ["/nodes/add", "/nodes/remove", "/nodes/terminate", "/nodes/terminate_all"]


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize("keys", [[], ["client"]])
def test_clients_change_no_nodes_unless_an_option_lets_them(path: str, keys: list[str]) -> None:
    async def go() -> None:
        headers = {"Authorization": "Bearer client"}
        async with world(FakeNode(), api_keys=keys, headers=headers) as w:
            reply = await w.client.post(path, json={"url": w.nodes[0].url})
            assert reply.status_code == 403 and "--allow-nodes-by-client" in reply.json()["error"]["message"]
            assert [node.url for node in w.state.nodes] == [w.nodes[0].url]
            assert not any(seen[0] == "/terminate" for seen in w.nodes[0].seen)

    run(go)


@pytest.mark.parametrize("path", CHANGES)
def test_web_pages_change_no_nodes(path: str) -> None:
    """A page may send what is no JSON without asking; before JSON its browser asks, and gets no leave."""

    async def go() -> None:
        headers = {"Origin": "http://evil.example"}
        async with world(FakeNode(), allow_nodes_by_client=True, allow_origins=["*"], headers=headers) as w:
            url = w.nodes[0].url
            plain = {"Content-Type": "text/plain"}
            for method in ("POST", "GET") if "terminate" in path else ("POST",):
                reply = await w.client.request(
                    method, f"{path}?node_url={url}", content=json.dumps({"url": url}), headers=plain
                )
                assert reply.status_code == 415 and "access-control-allow-origin" not in reply.headers
            asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
            assert "access-control-allow-origin" not in (await w.client.options(path, headers=asks)).headers
            assert "access-control-allow-origin" in (await w.client.options("/v1/models", headers=asks)).headers
            assert not any(seen[0] == "/terminate" for seen in w.nodes[0].seen) and len(list(w.state.nodes)) == 1

    run(go)


@pytest.mark.parametrize(
    ("who", "headers"),
    [
        ({"allow_nodes_by_client": True}, {}),  # curl -X POST -d "", requests.post
        ({"allow_nodes_by_client": True}, {"Content-Type": "application/x-www-form-urlencoded"}),
        ({"allow_nodes_by_client": True}, {"Origin": "{own}"}),  # the page at /docs
        ({"node_keys": ["operator"]}, {"Authorization": "Bearer operator", "Origin": "http://other.example"}),
    ],
)
def test_a_node_is_removed_by_its_url_and_an_empty_body(who: dict[str, Any], headers: dict[str, str]) -> None:
    async def go() -> None:
        async with world(FakeNode(), **who) as w:
            own = str(w.client.base_url).rstrip("/")
            sent = {name: value.format(own=own) for name, value in headers.items()}
            gone = await w.client.post(f"/nodes/remove?node_url={w.nodes[0].url}", headers=sent)
            assert (gone.status_code, gone.json()) == (200, {"removed": w.nodes[0].url})

    run(go)


def test_an_answer_has_one_date_and_one_server() -> None:
    async def go() -> None:
        async with world(FakeNode()) as w:
            headers = (await w.ask()).headers
            assert [len(headers.get_list(name)) for name in ("date", "server")] == [1, 1]
            assert "2024" not in headers["date"] and headers["server"] != "node"

    run(go)


@pytest.mark.parametrize("trusted", [False, True])
def test_the_operators_key_goes_to_the_operators_nodes_alone(trusted: bool, tmp_path: Path) -> None:
    async def go() -> None:
        late = await FakeNode(models=("late",)).start()
        who: dict[str, Any] = {"node_keys": ["operator"]} if trusted else {"allow_nodes_by_client": True}
        headers = {"Authorization": "Bearer operator"}
        file = tmp_path / "nodes.json"
        async with world(FakeNode(), node_key="inner", headers=headers, state_file=file, **who) as w:
            assert (await w.client.post("/nodes/add", json={"url": late.url})).status_code == 200
            await w.up(2)
            assert (await w.ask(model="late")).status_code == 200
            await w.client.post("/nodes/terminate", json={"url": late.url})
            assert "/terminate" in [path for path, _, _ in late.seen]
            keyed = {headers.get("authorization") for path, headers, _ in late.seen if path != "/health"}
            assert keyed == ({"Bearer inner"} if trusted else {None})
            await w.client.post("/nodes/add", json={"url": late.url})
            assert {node.url: node.trusted for node in Nodes(file)} == {w.nodes[0].url: True, late.url: trusted}
        late.kill()

    run(go)


async def raw_status(url: httpx.URL, target: str) -> int:
    """What is answered to a target that no client library would send."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"POST {target} HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode())
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


HIDDEN = [
    "/v1/../terminate", "/v1/%2e%2e/terminate", "/v1/.%2E/sleep", "/v1/..%2fterminate", "/v1/x/../../terminate",
    "/v1/%252e%252e/terminate", "/v1/a%3fb", "/v1/a%23b", "/v1/..%5cterminate", "/v1/./models", "/v1/a%0a",
    "/v1/%2e%2e", "/generate/../terminate", "//v1/../terminate",
]  # fmt: skip


@pytest.mark.parametrize("target", HIDDEN)
def test_no_path_hides_another(target: str) -> None:
    async def go() -> None:
        async with world(FakeNode(models=("m", "a b", "a/b"))) as w:
            assert await raw_status(w.client.base_url, target) == 404
            assert {path for path, _, _ in w.nodes[0].seen} <= {"/health", "/v1/models"}
            for good in ("/v1/responses/resp_1?a=%2e%2e", "/v1/models/a%20b", "/v1/models/a/b"):
                assert await raw_status(w.client.base_url, good) == 200
                assert w.nodes[0].asked[-1][0] == good

    run(go)


@pytest.mark.parametrize("begin", ["/v1/", "/v1/models?"])
def test_a_target_too_long_to_be_passed_on_is_told_so(begin: str) -> None:
    async def go() -> None:
        async with world(FakeNode()) as w:
            found = [await raw_status(w.client.base_url, begin + "a" * n) for n in (30000, 65400, 65450, 65500)]
            assert found == [200, 414, 414, 414] and all(node.down is None for node in w.state.nodes)

    run(go)


def test_control_of_nodes_does_not_go_through() -> None:
    async def go() -> None:
        async with world(FakeNode()) as w:
            for path in ("/terminate", "/sleep", "/abort_request", "/anything", "/v1/unload_lora_adapter"):
                assert (await w.client.post(path, json={})).status_code == 404
            refused = await w.client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "a"})
            assert refused.status_code == 404 and "--adapter-dir" in refused.json()["error"]["message"]
            assert not w.nodes[0].posts
            assert (await w.client.post("/tokenize", json={"prompt": "a"})).status_code == 200
            text = (await w.client.get("/metrics")).text
            assert f'toolkit_proxy:node_up{{node="{w.nodes[0].url}"}} 1.0' in text
            assert 'status="200"' in text

    run(go)


def test_a_session_keeps_its_node() -> None:
    async def go() -> None:
        async with world(FakeNode(), FakeNode(), FakeNode()) as w:
            ports = set()
            for session in range(8):
                found = set()
                for _ in range(3):
                    body = {"model": "m", "prompt": "a", "session_id": session, "interactive_mode": True}
                    found.add((await w.client.post("/v1/chat/interactive", json=body)).json()["node"])
                assert len(found) == 1
                ports |= found
            assert len(ports) > 1
            none = {"model": "m", "prompt": "a", "session_id": -1}  # as LMDeploy's clients say that it has no session
            replies = [await w.client.post("/v1/chat/interactive", json=none) for _ in range(24)]
            assert len({reply.json()["node"] for reply in replies}) > 1

    run(go)


# -- parts ------------------------------------------------------------------------------------------------


def some(*numbers: Any) -> list[Node]:
    return [Node(f"http://n{i}:1", ["m"], **fields) for i, fields in enumerate(numbers)]


def test_random_goes_by_speed() -> None:
    nodes = some({"speed": 30.0}, {"speed": 10.0}, {})  # the last counts as 20
    counts = {node.url: 0 for node in nodes}
    for _ in range(6000):
        counts[strategies.at_random(nodes, None, 0.0).url] += 1
    assert [round(n / 1000) for n in counts.values()] == [3, 1, 2]


def test_random_takes_any_speed() -> None:
    nodes = some({"speed": 1.7e308}, {"speed": 1.7e308}, {})
    assert {strategies.at_random(nodes, None, 0.0).url for _ in range(100)} == {node.url for node in nodes}


def test_expected_latency_is_waiting_over_speed() -> None:
    nodes = some({"speed": 4.0, "unfinished": 5}, {"speed": 1.0, "unfinished": 1}, {"unfinished": 3})
    assert strategies.min_expected_latency(nodes, None, 0.0) is nodes[0]  # 6/4, 2/1, 4/2.5
    nodes[0].unfinished = 9
    assert strategies.min_expected_latency(nodes, None, 0.0) is nodes[2]


def test_observed_latency_forgets_what_is_old() -> None:
    nodes = some({}, {}, {})
    nodes[0].latency.extend([(100.0, 2.0), (101.0, 4.0)])
    nodes[1].latency.extend([(100.0, 1.0)])
    nodes[2].latency.extend([(100.0, 9.0)])
    assert strategies.min_observed_latency(nodes, None, 102.0) is nodes[1]
    nodes[1].latency.append((102.0, 99.0))
    assert strategies.min_observed_latency(nodes, None, 103.0) is nodes[0]
    nodes[0].latency.append((300.0, 3.0))
    nodes[1].latency.append((300.0, 1.0))
    assert strategies.min_observed_latency(nodes, None, 301.0) is nodes[2]  # nothing known of late: it is tried
    nodes[2].unfinished = 1
    assert strategies.min_observed_latency(nodes, None, 301.0) is nodes[1]


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    nodes = some({}, {}, {})
    choose = strategies.strategy("prefix_cache_aware")
    start = [{"role": "system", "content": "x" * 3000}]
    owners = {}
    for talk in range(6):
        messages = [*start, {"role": "user", "content": f"{talk} " * 500}]
        for turn in range(4):
            chosen = choose(nodes, {"messages": messages}, 0.0)
            assert owners.setdefault(talk, chosen.url) == chosen.url
            messages = [*messages, {"role": "assistant", "content": f"{turn} " * 300}]
    first = choose(nodes, {"messages": start}, 0.0)
    first.unfinished = 10  # far busier than the others: the cache is not worth the wait
    assert choose(nodes, {"messages": start}, 0.0) is not first
    assert choose([nodes[1]], {"messages": start}, 0.0) is nodes[1]  # whoever had it is gone
    assert choose(nodes, None, 0.0) in nodes and choose(nodes, [1], 0.0) in nodes


def test_prompts_with_huge_numbers_and_huge_prompts_have_prefixes() -> None:
    assert strategies.prefixes({"prompt": [1, 10**40]}) and strategies.prefixes({"prompt": {"a": [{"b": 10**40}]}})
    long = [{"role": "user", "content": "x" * 1000, "n": 1}] * 400
    same = strategies.prefixes({"messages": long})
    assert len(same) == strategies.MOST_PIECES
    assert same == strategies.prefixes({"messages": [*long, {"content": ["y" * 100, object()]}]})  # not looked at


def test_unknown_strategies_are_refused() -> None:
    assert strategies.strategy("cache_aware").__class__ is strategies.PrefixCacheAware
    with pytest.raises(UsageError, match="random, min_expected_latency"):
        strategies.strategy("best")


def test_nodes_are_kept_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    nodes = Nodes(file)
    nodes.add("http://a:1", ["m"], 2.5)
    nodes.add("http://b:1", lease=90.0)
    nodes.add("http://c:1")
    nodes.remove("http://c:1")
    again = {node.url: node for node in Nodes(file)}
    assert list(again) == ["http://a:1", "http://b:1"]
    assert (again["http://a:1"].models, again["http://a:1"].speed) == (["m"], 2.5)
    assert again["http://b:1"].lease == 90.0 and again["http://b:1"].down is not None
    for bad in ('{"nodes": {"http://a:1": 5}}', '{"nodes": {"ftp://a": {"models": []}}}', "[]", "{"):
        file.write_text(bad)
        with pytest.raises(ToolkitError):
            Nodes(file)


def test_a_lease_ends() -> None:
    now = [0.0]
    nodes = Nodes(clock=lambda: now[0])
    nodes.add("http://a:1", lease=10.0)
    nodes.add("http://b:1")
    now[0] = 9.0
    nodes.add("http://a:1", lease=10.0)
    now[0] = 18.0
    nodes.drop_expired()
    assert nodes.find("http://a:1") and nodes.find("http://b:1/")
    now[0] = 20.0
    nodes.drop_expired()
    assert not nodes.find("http://a:1") and nodes.find("http://b:1")


def test_a_file_that_cannot_be_written_any_more_ends_no_looks(tmp_path: Path, caplog: Any) -> None:
    async def go() -> None:
        folder = tmp_path / "kept"
        folder.mkdir()
        async with world(state_file=folder / "nodes.json", allow_nodes_by_client=True) as w:
            leased, later = await FakeNode().start(), await FakeNode().start()
            added = await w.client.post("/nodes/add", json={"url": leased.url, "lease": 0.5})
            assert added.status_code == 200 and added.json()["healthy"]
            shutil.rmtree(folder)
            folder.touch()
            await soon(lambda: not list(w.state.nodes))
            assert (await w.client.post("/nodes/add", json={"url": later.url})).status_code == 500
            await w.up(1)
            leased.kill()
            later.kill()

    run(go)
    assert "cannot be written" in caplog.text and "Traceback" not in caplog.text


def test_a_node_rests_longer_the_more_often_it_fails() -> None:
    node = Node("http://a:1")
    pauses = []
    for _ in range(9):
        node.failed("x", 100.0)
        pauses.append(node.look_at - 100.0)
    assert pauses[:3] == [0.5, 1.0, 2.0] and pauses[-1] == 30.0
    node.worked(1.0, 100.0)
    node.failed("x", 100.0)
    assert node.look_at == 100.5


def test_a_server_announces_itself() -> None:
    async def go() -> None:
        async with world(node_keys=["operator"]) as w:
            server = await FakeNode().start()
            proxy = str(w.client.base_url).rstrip("/")
            told = Announcement(proxy, "operator")
            told.check()
            task = asyncio.create_task(told.repeat(lambda: ("m", "adapter"), server.url))
            await w.up(1)
            (node,) = w.state.nodes
            assert node.lease and node.url == server.url
            task.cancel()
            await asyncio.wait([task])
            assert not list(w.state.nodes)
            server.kill()

    run(go)


def test_adapters_that_come_later_are_announced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a proxy, which has seen them meanwhile, would forget them until it looks again."""
    told: list[list[str]] = []
    sleep = asyncio.sleep

    async def go() -> None:
        names, done = ["m"], asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/nodes/add":
                told.append(json.loads(request.content)["status"]["models"])
                names.append("tune")
                done.set() if len(told) > 1 else None
            return httpx.Response(200)

        client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(announce.httpx, "AsyncClient", client)
        monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))
        task = asyncio.create_task(Announcement("http://127.0.0.1:1").repeat(lambda: names, "http://127.0.0.1:2"))
        await done.wait()
        task.cancel()
        await asyncio.wait([task])

    run(go)
    assert told[:2] == [["m"], ["m", "tune"]]


def test_a_server_that_ends_before_the_proxy_answers_takes_itself_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy may have it by then, and would send it requests."""
    asked: list[str] = []

    async def go() -> None:
        arrived = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            arrived.set()
            if request.url.path == "/nodes/add":
                await asyncio.Event().wait()
            return httpx.Response(200)

        client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(announce.httpx, "AsyncClient", client)
        task = asyncio.create_task(Announcement("http://127.0.0.1:1").repeat(lambda: ("m",), "http://127.0.0.1:2"))
        await arrived.wait()
        task.cancel()
        await asyncio.wait([task])

    run(go)
    assert asked == ["/nodes/add", "/nodes/remove"]


def test_a_node_s_health_is_told_where_it_is_added() -> None:
    async def go() -> None:
        async with world(allow_nodes_by_client=True) as w:
            server = await FakeNode(models=("x",)).start()
            told = (await w.client.post("/nodes/add", json={"url": server.url})).json()
            assert (told["healthy"], told["reason"], told["models"]) == (True, None, ["x"])
            server.kill()
            gone = await FakeNode().start()
            gone.kill()
            told = (await w.client.post("/nodes/add", json={"url": gone.url})).json()
            assert told["healthy"] is False and "Connect" in told["reason"]

    run(go)


def test_a_server_says_that_its_proxy_does_not_reach_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it listens on its own machine alone and the proxy is on another. Once, and when it works after all."""
    sleep = asyncio.sleep

    async def go() -> None:
        down = {"healthy": False, "reason": "ConnectError: refused"}
        answers: list[Any] = [{"healthy": False, "reason": UNSEEN}, down, down, {"healthy": True, "reason": None}]
        asked, done = [], asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            if request.url.path == "/nodes/add" and len(answers) == 1:
                done.set()
                monkeypatch.setattr(asyncio, "sleep", sleep)
            return httpx.Response(200, json=answers.pop(0) if answers else {})

        client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(announce.httpx, "AsyncClient", client)
        monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))
        task = asyncio.create_task(Announcement("http://10.0.0.1:1").repeat(lambda: ("m",), "http://127.0.0.1:2"))
        await done.wait()
        await sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        assert asked[-1] == "/nodes/remove"

    with caplog.at_level("WARNING", "toolkit.serve"):
        run(go)
    lines = [record.getMessage() for record in caplog.records if record.name == "toolkit.serve"]
    assert [line.split(" ")[0] for line in lines] == ["http://127.0.0.1:2", "--proxy-url", "http://127.0.0.1:2"]
    assert "sends no requests to http://127.0.0.1:2 (ConnectError: refused); is that where" in lines[1]


def test_trouble_with_a_proxy_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Refused, then away, then back: a line each, without JSON, whatever the number of tries; pauses grow."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def passing(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def go() -> None:
        answers = [(401, {"error": {"message": "give a\nkey", "type": "x"}})] * 4 + [None] * 9
        answers += [(200, {})] * 2 + [None] * 2 + [(200, {})]  # type: ignore[list-item]
        done = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/nodes/remove":
                return httpx.Response(200)
            given = answers.pop(0)
            if not answers:
                done.set()
                monkeypatch.setattr(asyncio, "sleep", sleep)
            if given is None:
                raise httpx.ConnectError("no route")
            return httpx.Response(given[0], json=given[1])

        client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(announce.httpx, "AsyncClient", client)
        monkeypatch.setattr(asyncio, "sleep", passing)
        task = asyncio.create_task(Announcement("http://p:1").repeat(lambda: ["m"], "http://me:2"))
        await done.wait()
        while len(caplog.records) < 5 and not task.done():
            await sleep(0.001)
        task.cancel()
        await asyncio.wait([task])

    with caplog.at_level("WARNING", "toolkit.serve"):
        asyncio.run(go())
    told = [record.message for record in caplog.records]
    assert len(told) == 5, told
    assert "refuses this server: give a key; it is tried again" in told[0] and "{" not in told[0]
    assert "cannot be told of this server" in told[1] and told[1] == told[3]
    assert told[2] == told[4] == "http://me:2 gets requests from the proxy http://p:1"
    assert pauses[:6] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0] and pauses[13:16] == [15.0, 15.0, 2.0]


def test_a_proxy_whose_name_is_none_yet_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where both come up together, the one by the other's name."""
    asked: list[Any] = []
    where = [OSError(-2, "Name or service not known"), OSError(-2, "Name or service not known"), "http://10.0.0.4:2"]
    sleep = asyncio.sleep

    def found(told: Announcement, url: str) -> str:
        one = where.pop(0)
        if isinstance(one, OSError):
            raise one
        return one

    async def go() -> None:
        arrived = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            asked.append((request.url.path, json.loads(request.content)["url"] if request.content else None))
            arrived.set()
            return httpx.Response(200)

        client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(announce.httpx, "AsyncClient", client)
        monkeypatch.setattr(Announcement, "own_address", found)
        monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0 if seconds < announce.EVERY_S else seconds))
        task = asyncio.create_task(Announcement("http://proxy:1").repeat(lambda: ["m"], "http://0.0.0.0:2"))
        await arrived.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    with caplog.at_level("WARNING", "toolkit.serve"):
        run(go)
    assert asked == [("/nodes/add", "http://10.0.0.4:2"), ("/nodes/remove", None)]
    assert sum("Name or service not known" in record.message for record in caplog.records) == 1


def test_a_server_knows_its_address() -> None:
    told = Announcement("http://127.0.0.1:8000")
    assert told.own_address("http://127.0.0.1:5") == "http://127.0.0.1:5"
    assert told.own_address("http://0.0.0.0:5") == "http://127.0.0.1:5"
    if socket.has_dualstack_ipv6():
        assert Announcement("http://[::1]:8000").own_address("http://[::]:5") == "http://[::1]:5"
    assert Announcement("http://p:1", None, "https://me:2/").own_address("http://0.0.0.0:5") == "https://me:2"
    with pytest.raises(UsageError, match="--proxy-url"):
        Announcement("p:1").check()
    assert checked("http://[::1]:8000/") == "http://[::1]:8000"


async def soon(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


def test_a_proxy_is_no_node_of_its_own() -> None:
    async def go() -> None:
        async with world(FakeNode(), allow_nodes_by_client=True) as w:
            itself = str(w.client.base_url).rstrip("/")
            for url in (itself, itself.replace("127.0.0.1", "localhost")):
                refused = await w.client.post("/nodes/add", json={"url": url, "status": {"models": ["dead"]}})
                assert refused.status_code == 400 and "the proxy itself" in refused.json()["error"]["message"]
                assert len(list(w.state.nodes)) == 1
            node = w.state.nodes.add(itself, ["dead"])  # as the command line or a state file may have it
            await soon(lambda: node.loops)
            assert w.state.nodes.models() == ["m"] and (await w.ask(model="dead")).status_code == 404
            w.state.nodes.remove(w.nodes[0].url)
            assert (await w.ask()).status_code == 503 and node.unfinished == 0
            assert (await w.client.get("/health")).status_code == 503

    run(go)


def test_proxies_that_lead_to_each_other() -> None:
    """One of the two ways is given up; models that are gone are gone on both."""

    async def go() -> None:
        async with world(FakeNode(models=("m",))) as a, world(FakeNode(models=("n",))) as b:
            (b_node, a_node) = (one.state.nodes.add(str(other.client.base_url)) for one, other in ((a, b), (b, a)))
            await soon(lambda: (b_node.loops or a_node.loops) and "n" in b.state.nodes.models())
            await soon(lambda: sum(node.down is None for node in (a_node, b_node)) == 1)
            front, behind = (a, b) if b_node.down is None else (b, a)
            await soon(lambda: set(front.state.nodes.models()) == {"m", "n"})
            for name in ("m", "n"):
                assert (await front.ask(model=name)).status_code == 200
            own = front.nodes[0].models[0]
            assert behind.state.nodes.models() == [*behind.nodes[0].models]
            assert (await behind.ask(model=own)).status_code == 404
            behind.nodes[0].models = ()
            await soon(lambda: front.state.nodes.models() == [own] and behind.state.nodes.models() == [])
            assert all(node.unfinished == 0 for w in (a, b) for node in w.state.nodes)

    run(go)


def test_a_request_goes_through_a_proxy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loop is not known yet."""
    monkeypatch.setattr(watching, "proxies", lambda body: [])

    async def go() -> None:
        async with world() as a, world() as b:
            for one, other in ((a, b), (b, a)):
                one.state.nodes.add(str(other.client.base_url), ["m"])
            reply = await a.ask()  # neither is healthy; then all are tried
            assert reply.status_code == 508 and reply.json()["error"]["code"] == "proxy_loop"
            assert all(node.unfinished == 0 for w in (a, b) for node in w.state.nodes)
        other = FakeNode(status=508)
        async with world(other, FakeNode()) as w:  # who leads somebody else's request in a circle may do well by ours
            while not other.posts:
                assert (await w.ask()).status_code == 200
            assert w.state.nodes.find(other.url).down is None
        async with world(FakeNode()) as w:
            for via, status in (("1.1 cdn", 200), ("1.1 a, 1.1 b,1.1 c", 200), (", ".join(["1.1 x"] * 9), 508)):
                assert (await w.client.post("/v1/completions", json={}, headers={"Via": via})).status_code == status
            seen = w.nodes[0].asked[-1][1]["via"]
            assert seen == f"1.1 a, 1.1 b, 1.1 c, 1.1 toolkit-{w.state.id}"
            assert (await w.client.post("/v1/completions", json={}, headers={"Via": seen})).status_code == 508

    run(go)


def whole(body: bytes, status: int = 200, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


CHUNKS = "transfer-encoding: chunked\r\n"
NESTED = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    ("path", "said", "again", "why"),
    [
        ("/health", whole(b"x" * 2_000_000), b"", "more than 1,048,576 bytes"),
        ("/health", f"HTTP/1.1 200 X\r\n{CHUNKS}\r\n".encode(), b"1000\r\n" + b"x" * 4096 + b"\r\n", "more than"),
        ("/health", f"HTTP/1.1 200 X\r\n{CHUNKS}\r\n".encode(), b"1\r\nx\r\n", "no whole answer"),
        ("/health", b"HTTP/1.1 ", b"1", "no whole answer"),
        ("/health", b"", b"HTTP/1.1 100 Continue\r\n\r\n", "no whole answer"),
        ("/health", whole(b"{}", 999), b"", "status 999"),
        ("/health", whole(b"0\r\n\r\n", more=CHUNKS), b"", "Content-Length beside Transfer-Encoding"),
        ("/health", whole(b"x", more="content-encoding: gzip\r\n"), b"", "packed"),
        ("/v1/models", f"HTTP/1.1 200 X\r\n{CHUNKS}\r\n".encode(), b"1000\r\n" + b"x" * 4096 + b"\r\n", "more than"),
        ("/v1/models", whole(NESTED), b"", None),
        ("/v1/models", whole(b'{"data": {"a": ' + NESTED + b"}}"), b"", None),
        ("/v1/models", whole(b'{"data": 5}'), b"", None),
        ("/health", whole(NESTED), b"", None),
        ("/health", whole(b'{"proxies": [[], 5, "x"]}'), b"", None),
    ],
)
def test_what_a_node_says_is_bounded(
    path: str, said: bytes, again: bytes, why: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(asking, "PATIENCE_S", 1.0 if why == "no whole answer" else 60.0)

    async def go() -> None:
        node = await FakeNode(raw={path: said}, again=again, delay=0.001).start()
        state = ProxyState(ProxySettings(node=[node.url]))
        (it,) = state.nodes
        await watching.look(state, it)
        assert why in (it.down or "") if why else it.down is None
        assert node.sent < 8 << 20 and not any(record.exc_info for record in caplog.records)
        node.kill()
        await state.http.aclose()

    run(go)


ODD_NAMES = ["", " x", "a\0b", "a\nb", "a\u202eb", "\u2028", "x" * 257, "x" * 100_000, 5, None, ["x"]]


def test_names_that_are_none_are_not_listed(tmp_path: Path) -> None:
    async def go() -> None:
        cards = json.dumps({"data": [{"id": name} for name in ["good", *ODD_NAMES, "very good", "good"]]}).encode()
        async with world(FakeNode(raw={"/v1/models": whole(cards)}), allow_nodes_by_client=True) as w:
            assert w.state.nodes.models() == ["good", "very good"]
            for name in ODD_NAMES:
                body = json.dumps({"url": "http://127.0.0.1:9", "status": {"models": [name]}}).encode()
                added = await w.client.post("/nodes/add", content=body, headers={"Content-Type": "application/json"})
                assert added.status_code == 400 and len(added.content) < 1000, name
            assert len(list(w.state.nodes)) == 1
            w.nodes[0].raw["/v1/models"] = whole(json.dumps({"data": [{"id": f"m{i}"} for i in range(4096)]}).encode())
            await soon(lambda: len(w.state.nodes.models()) == 4096)
            told = await w.ask(model="none")
            assert told.status_code == 404 and len(told.content) < 1000
        file = tmp_path / "nodes.json"
        file.write_text(json.dumps({"nodes": {"http://127.0.0.1:9": {"models": ["a\nb"]}}}))
        with pytest.raises(ToolkitError, match="visible characters"):
            Nodes(file)

    run(go)


@pytest.mark.parametrize("host", ["a\u202eb", "a\nb", "a\0b", "a" * 300, "a" * 64, "a..b"])
def test_addresses_that_are_none_are_refused(host: str) -> None:
    with pytest.raises(UsageError, match="url: expected"):
        checked(f"http://{host}:1")


def test_names_may_be_listed_while_nodes_come() -> None:
    """As /api/tags lists them, in a thread of its own."""
    found = Nodes()

    class Names(list[str]):
        def __iter__(self) -> Iterator[str]:
            found.add(f"http://127.0.0.1:{len(list(found)) + 1}")
            return super().__iter__()

    found.add("http://127.0.0.1:1").models = Names(["a"])
    assert found.models() == ["a"] and len(list(found)) == 2


def test_there_are_only_so_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "MOST_NODES", 2)
    found = Nodes()
    for number in (1, 2, 1):
        found.add(f"http://127.0.0.1:{number}")
    with pytest.raises(UsageError, match="2 nodes already"):
        found.add("http://127.0.0.1:3")


@pytest.mark.parametrize(
    "said",
    [
        whole(b"{}", 999),
        whole(b"0\r\n\r\n", more=CHUNKS),
        whole(b"{}", 600),
        b"HTTP/1.1 200 X\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_an_answer_that_cannot_be_passed_on_is_asked_for_elsewhere(said: bytes, caplog: Any) -> None:
    async def go() -> None:
        odd = FakeNode(raw={"/v1/completions": said})
        async with world(odd) as w:
            alone = await w.ask()
            assert alone.status_code == 503 and alone.json()["error"]["code"] == "no_node"
            assert len(odd.asked) == 1
            good = await FakeNode().start()
            w.state.nodes.add(good.url)
            await w.up(2)
            assert {(await w.ask()).json()["node"] for _ in range(4)} == {good.port}
            good.kill()
        assert not any(record.exc_info for record in caplog.records)

    run(go)


def test_a_node_that_goes_silent_has_failed() -> None:
    async def go() -> None:
        silent, good = FakeNode(go_on=asyncio.Semaphore(0)), FakeNode()
        async with world(silent, node_timeout=1.5) as w:
            reply = await w.ask()
            assert reply.status_code == 503 and "ReadTimeout" in reply.json()["error"]["message"]
            broken = await w.ask(stream=True)
            assert "node_lost" in broken.text and w.state.metrics.broken._value.get() == 1
            await good.start()
            w.state.nodes.add(good.url)
            await w.up(2)
            replies = await asyncio.gather(*(w.ask() for _ in range(6)))
            assert {reply.json()["node"] for reply in replies} == {good.port}
            good.kill()

    run(go)


def test_what_a_node_says_to_its_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        head = f"HTTP/1.1 200 X\r\n{CHUNKS}\r\n".encode()
        for patience, said, again, told in (
            (60.0, head, b"1000\r\n" + b"x" * 4096 + b"\r\n", "more than 1,048,576 bytes"),
            (1.0, head, b"1\r\nx\r\n", "no whole answer within 1 s"),
            (60.0, whole(b"a\0b\nc" * 1000, 403), b"", "HTTP 403: a b c"),
        ):
            monkeypatch.setattr(asking, "PATIENCE_S", patience)
            node = FakeNode(raw={"/terminate": said}, again=again)
            async with world(node, node_keys=["k"], headers={"Authorization": "Bearer k"}) as w:
                found = (await w.client.post("/nodes/terminate_all")).json()[node.url]
                assert told in found and len(found) < 500 and len(list(w.state.nodes)) == 1

    run(go)
