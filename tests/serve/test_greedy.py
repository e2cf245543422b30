"""What one key can take from others: places to wait, bytes of bodies and answers, batches, uploads, requests to end."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from tests.serve.test_batches import client_of, create, line
from toolkit.errors import UsageError
from toolkit.messages import Response
from toolkit.serve import adapter_routes
from toolkit.serve.generation.choices import _bytes
from toolkit.serve.http import connection as connection_module
from toolkit.serve.http.access.users import work_of
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.sharing.held import NUMBER_BYTES, Held, account
from toolkit.serve.openai.batches.loop import Turns
from toolkit.serve.options import ProxySettings
from toolkit.serve.proxy.apart import Apart
from toolkit.serve.proxy.nodes import Lends, Node

KEYS: dict[str, Any] = {"api_keys": ["greedy", "modest"]}
BODY = {"model": "echo", "prompt": "ab"}
JSON = {"Content-Type": "application/json"}


def head(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_full_queue_has_room_for_who_has_little_of_it(start: Any) -> None:
    """And is no more than twice as long so; the greedy one is refused."""
    server = start(engine={"held": True, "max_batch_size": 1}, limits=Limits(max_queue=4), **KEYS)

    async def go() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask(key: str) -> int:
                return (await client.post("/v1/completions", json=BODY, headers=head(key))).status_code

            admitted, tasks = server.app.state.server.admitted, []
            for number in range(5):
                tasks.append(asyncio.create_task(ask("greedy")))
                await until(lambda: len(admitted) == number + 1)  # noqa: B023
            assert await ask("greedy") == 429
            for number in range(2):
                tasks.append(asyncio.create_task(ask("modest")))
                await until(lambda: len(admitted) == 6 + number)  # noqa: B023
            assert await ask("modest") == 429, "it has its half"
            server.engine.held = False
            assert await asyncio.gather(*tasks) == [200] * 7
        await until(lambda: not server.app.state.server.of_users)

    asyncio.run(asyncio.wait_for(go(), 60))


def test_abort_request_ends_the_asker_s_own_requests(start: Any) -> None:
    """By a number of a session that both have chosen, and all."""
    server = start(engine={"held": True}, enable_abort_handling=True, **KEYS)

    async def go() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask(key: str, path: str, **body: Any) -> httpx.Response:
                return await client.post(path, json=body, headers=head(key))

            tasks = [asyncio.create_task(ask(k, "/v1/completions", **BODY, session_id=1)) for k in KEYS["api_keys"]]
            await until(lambda: len(server.engine.running) == 2)
            assert (await ask("greedy", "/abort_request", session_id=1)).json() == {"aborted": 1}
            assert (await tasks[0]).status_code == 499
            assert (await ask("greedy", "/abort_request", abort_all=True)).json() == {"aborted": 0}
            assert (await ask("greedy", "/abort_request")).status_code == 400
            (left,) = server.engine.running
            name = left.rpartition("-")[0]
            assert (await ask("greedy", "/abort_request", request_id=name)).status_code == 400
            assert (await ask("modest", "/abort_request", request_id=name)).json() == {"aborted": 1}
            assert (await tasks[1]).status_code == 499

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "a\u202eb", " a", "x" * 300])
def test_an_adapter_is_called_what_can_be_listed(start: Any, tmp_path: Any, name: str) -> None:
    with pytest.raises(UsageError, match="lora_name: expected up to 256 visible"):
        adapter_routes.load(start().app.state.server, name, tmp_path)


def test_wrong_predictions_are_tokens_that_a_key_has_used(start: Any, tmp_path: Any) -> None:
    """The server has computed them because the client said so; the engine's own guesses cost nobody anything."""
    server = start(key_tokens_per_minute=1000, **KEYS)
    used = server.app.state.server.quotas._used
    body = {"model": "echo", "messages": "abcd", "max_tokens": 3}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        costs = []
        for key, more in (("greedy", {"prediction": {"type": "content", "content": "zz"}}), ("modest", {})):
            before = dict(used)
            assert client.post("/v1/chat/completions", json=body | more, headers=head(key)).status_code == 200
            (new,) = used.keys() - before.keys()
            costs.append(used[new].tokens)
    assert 0.9 < costs[0] - costs[1] < 1.1, "the stand-in rejects one"


def test_vectors_and_experts_count_among_what_answers_hold() -> None:
    vector = Response(last_hidden_state=np.ones((1, 8), np.float32))
    assert _bytes(vector) == 8 * NUMBER_BYTES
    assert _bytes(Response(routed_experts=np.ones((5, 3, 2), np.int16))) == 30 * NUMBER_BYTES


def test_embeddings_beyond_the_limit_end(start: Any) -> None:
    server = start(limits=Limits(max_held_bytes=10 * 4 * NUMBER_BYTES))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for count, status in ((9, 200), (11, 400), (9, 200)):
            reply = client.post("/v1/embeddings", json={"model": "echo", "input": ["a"] * count})
            assert reply.status_code == status and ("--max-held-bytes" in reply.text) == (status == 400)


def test_the_largest_answer_of_who_has_most_ends() -> None:
    """Not the largest of all, which may be all that its user has."""
    held = Held(Limits(max_held_bytes=100))
    with ExitStack() as stack:
        accounts = []
        for _ in range(4):
            stack.enter_context(held.answer())
            accounts.append(account.get())
        modest, *greedy = accounts
        assert modest is not None
        modest.add(40, "modest")
        for one, size in zip(greedy, (20, 25, 20), strict=True):
            assert one is not None
            one.add(size, "greedy")
        assert [one.over for one in accounts if one] == [False, False, True, False]


def test_a_key_s_bodies_leave_room_for_others(start: Any) -> None:
    """It has one body, and more only as far as as much is left."""
    server = start(engine={"held": True}, limits=Limits(max_pending_bytes=100_000), **KEYS)
    large = {**BODY, "user": "x" * 30_000}

    async def go() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask(key: str) -> httpx.Response:
                return await client.post("/v1/completions", json=large, headers=head(key))

            tasks = [asyncio.create_task(ask("greedy"))]
            await until(lambda: len(server.engine.running) == 1)
            refused = await ask("greedy")  # 60 of them, and 40 are left
            assert refused.status_code == 429 and "--max-pending-bytes" in refused.text
            tasks.append(asyncio.create_task(ask("modest")))
            await until(lambda: len(server.engine.running) == 2)
            server.engine.held = False
            assert [(await task).status_code for task in tasks] == [200, 200]
            assert (await ask("greedy")).status_code == 200

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_refused_body_counts_no_more_while_its_rest_is_awaited(start: Any) -> None:
    """Many of one key, each refused by its first part, leave what others need."""
    server = start(engine={"held": True}, limits=Limits(max_pending_bytes=100_000), **KEYS)
    large = json.dumps({**BODY, "user": "x" * 45_000}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

    async def go(stack: ExitStack) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            send = client.post("/v1/completions", content=large, headers={**JSON, **head("greedy")})
            first = asyncio.create_task(send)
            await until(lambda: len(server.engine.running) == 1)
            for _ in range(4):
                one = stack.enter_context(socket.create_connection((client.base_url.host, client.base_url.port), 60))
                one.sendall(post + b"Authorization: Bearer greedy\r\nContent-Length: 90000\r\n\r\n" + large)
            await asyncio.sleep(0.5)  # of the five seconds in which their rest may come
            asked = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=head("modest")))
            await until(lambda: len(server.engine.running) == 2 or asked.done())
            server.engine.held = False
            assert [(await task).status_code for task in (first, asked)] == [200, 200]

    with ExitStack() as stack:
        asyncio.run(asyncio.wait_for(go(stack), 60))


@pytest.mark.parametrize("slow", [False, True])
def test_bodies_that_do_not_come_make_room(start: Any, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """Those that were refused for want of a key at once, those that are awaited after a while."""
    monkeypatch.setattr(connection_module, "SHORT_HEAD_S", 0.2 if slow else 60.0)
    server = start(limits=Limits(max_connections=4), **KEYS)
    host, port = server.url.removeprefix("http://").split(":")
    key = b"greedy" if slow else b"none"
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key
    with ExitStack() as stack:
        for _ in range(12):
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            one.sendall(half + b"\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.05)
        time.sleep(0.3)
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert client.post("/v1/completions", json=BODY, headers=head("modest")).status_code == 200


def test_a_key_s_batches_leave_room_for_others(start: Any) -> None:
    server = start(engine={"held": True}, limits=Limits(max_batches=4), **KEYS)
    greedy, modest = (client_of(server.v1, key) for key in KEYS["api_keys"])
    for _ in range(2):
        create(greedy, [line("a")])
    with pytest.raises(Exception, match="--max-batches"):
        create(greedy, [line("a")])
    create(modest, [line("a")])
    server.engine.held = False


def test_lines_of_batches_go_round_by_owner() -> None:
    """However many batches one has."""

    async def go() -> list[str]:
        turns, order, most = Turns(lambda: 1), list[str](), 6

        async def work(owner: str) -> None:
            work_of.set(owner)
            for _ in range(most):
                await turns.begin()
                order.append(owner)
                await asyncio.sleep(0)
                turns.end()

        tasks = [asyncio.create_task(work("greedy")) for _ in range(5)]
        tasks.append(asyncio.create_task(work("modest")))
        await asyncio.gather(*tasks)
        return order

    order = asyncio.run(asyncio.wait_for(go(), 60))
    assert len(order) == 36 and order[:16].count("modest") == 6, order


def test_uploads_of_one_key_do_not_hold_up_another_s(start: Any) -> None:
    server = start(**KEYS)
    host, port = server.url.removeprefix("http://").split(":")
    half = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer greedy\r\nContent-Length: 1000\r\n"
    with ExitStack() as stack:
        for _ in range(12):
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            one.sendall(half + b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n")
        time.sleep(0.3)
        data = json.dumps({"a": 1}).encode()
        assert client_of(server.v1, "modest").files.create(file=("in.jsonl", data), purpose="batch").id


def test_texts_to_encode_are_bounded_in_number(start: Any) -> None:
    with httpx.Client(base_url=start(limits=Limits(max_choices=3)).url, timeout=60) as client:
        assert client.post("/v1/encode", json={"input": ["a", "b", "c"]}).json()["length"] == [1, 1, 1]
        refused = client.post("/v1/encode", json={"input": ["a"] * 4})
        assert refused.status_code == 400 and "--max-choices" in refused.text


def test_a_node_of_a_client_sends_no_node_of_the_operator_anywhere() -> None:
    """What a lender says of where it lends is an address that the other node would connect to."""
    lends = Lends("ab" * 16, '{"address": "169.254.169.254:80"}')
    asked: list[str] = []

    async def told() -> AsyncIterator[bytes]:
        yield b'{"status": 1}'

    def connected(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(200, content=told())

    async def go() -> list[str]:
        state: Any = SimpleNamespace(
            settings=ProxySettings(),
            clock=lambda: 0.0,
            nodes=[Node("http://l", lends=lends)],
            http=httpx.AsyncClient(transport=httpx.MockTransport(connected)),
            key_headers=lambda node: {},
        )
        apart = Apart(state, 0)
        found = []
        for trusted, lender in ((True, False), (False, False), (True, True), (False, True)):
            node = Node(f"http://{trusted}{lender}", role="Decode", trusted=trusted)
            found.append(await apart.linked(node, Node("http://l", role="Prefill", lends=lends, trusted=lender)))
        return found

    assert asyncio.run(go()) == ["", lends.engine_id, lends.engine_id, lends.engine_id]
    assert len(asked) == 3
