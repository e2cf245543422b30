"""Whose what is kept is: directly, through a fleet and through a proxy; and who gives way where it is too much."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.serve.test_batches import client_of, create, ended, line, read
from tests.serve.test_proxy import world
from toolkit.serve.fleet.app import create_app
from toolkit.serve.fleet.catalog import Listed
from toolkit.serve.fleet.fleet import Fleet
from toolkit.serve.http.access.auth import KEY
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.access.proxies import Proxies
from toolkit.serve.http.access.users import HEADER, User, Users, asks_for, current_user
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.sharing.shares import Shares
from toolkit.serve.openai.responses.kept import Store
from toolkit.serve.options import ProxySettings

INNER = "inner"  # the key that a front sends to what is behind it


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def said(owner: str) -> dict[str, str]:
    """The header of a proxy that asks for ``owner``."""
    return {HEADER: json.dumps({"owner": owner})}


@asynccontextmanager
async def way(kind: str, start: Any, tmp_path: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with the keys a and b: its own, or those of what is in front of it."""
    server = start(api_keys=["a", "b"] if kind == "direct" else [INNER], **settings)
    keys: Any = {"api_keys": ["a", "b"], "node_key": INNER}
    if kind == "direct":
        async with httpx.AsyncClient(base_url=server.url) as client:
            yield client
    elif kind == "proxy":
        async with world(node=[server.url], **keys) as w:
            yield w.client
    else:

        class Child:
            url, memory = server.url, 1

            def alive(self) -> bool:
                return True

            def close(self) -> None:
                pass

        (tmp_path / "echo").mkdir()
        fleet = Fleet([Listed("echo", str(tmp_path / "echo"))], lambda listed: Child())  # type: ignore[arg-type,return-value]
        app = create_app(fleet, ProxySettings(**keys), lambda model: {})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            yield client
        await app.state.server.http.aclose()


@pytest.mark.parametrize("kind", ["direct", "fleet", "proxy"])
def test_a_response_is_its_keys_alone(kind: str, start: Any, tmp_path: Path) -> None:
    """Another key cannot go on from it, read it or forget it, whatever it says in headers."""

    async def go() -> None:
        async with way(kind, start, tmp_path) as client:

            async def ask(method: str, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
                return await client.request(method, path, json=body, headers=headers)

            made = await ask("POST", "/v1/responses", {"model": "echo", "input": "My secret."}, bearer("a"))
            assert made.status_code == 200
            id = made.json()["id"]
            forged = [said(asks_for({KEY: b"a"}, User(""), node_key)) for node_key in (INNER, "b")]
            more = {"model": "echo", "input": "Say it again.", "previous_response_id": id}
            for others in (bearer("b"), *(bearer("b") | extra for extra in forged)):
                refused = await ask("POST", "/v1/responses", more, others)
                assert refused.status_code == 400 and refused.json()["error"]["code"] == "previous_response_not_found"
                for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
                    assert (await ask(method, f"/v1/responses/{id}{path}", None, others)).status_code == 404
            assert (await ask("POST", "/v1/responses", more, bearer("a"))).status_code == 200
            if kind != "fleet":  # there, what names no model is nobody's
                found = await ask("GET", f"/v1/responses/{id}", None, {"x-api-key": "a"})
                assert found.status_code == 200 and "My secret." in found.text
                assert (await ask("DELETE", f"/v1/responses/{id}", None, bearer("a"))).status_code == 200

    asyncio.run(asyncio.wait_for(go(), 120))


@pytest.mark.parametrize("kind", ["direct", "fleet", "proxy"])
def test_a_greedy_key_loses_its_own(kind: str, start: Any, tmp_path: Path) -> None:
    """Sessions and responses of another stay, also where the greedy one calls itself another each time."""

    async def go() -> None:
        limits = Limits(max_sessions=8, max_stored_responses=8)
        async with way(kind, start, tmp_path, limits=limits) as client:

            async def turn(number: int, headers: dict[str, str]) -> httpx.Response:
                body = {"model": "echo", "prompt": "hi", "session_id": number, "interactive_mode": True}
                return await client.post("/v1/chat/interactive", json=body, headers=headers)

            async def respond(headers: dict[str, str], **more: Any) -> httpx.Response:
                body = {"model": "echo", "input": "hi", **more}
                return await client.post("/v1/responses", json=body, headers=headers)

            await turn(1, bearer("a"))
            kept = (await respond(bearer("a"))).json()["id"]
            for number in range(20):
                many = bearer("b") | said(f"{number:08x}")
                assert (await turn(number, many)).status_code == 200
                assert (await respond(many)).status_code == 200
            assert (await turn(1, bearer("a"))).json()["history_tokens"] > 0
            assert (await respond(bearer("a"), previous_response_id=kept)).status_code == 200
            told = await turn(0, bearer("b") | said(f"{0:08x}"))
            assert told.status_code == 410 and "--max-sessions" in told.json()["error"]["message"]
            assert told.json()["error"]["code"] == "session_forgotten"
            assert (await turn(0, bearer("b") | said(f"{0:08x}"))).json()["history_tokens"] == 0

    asyncio.run(asyncio.wait_for(go(), 120))


def test_a_place_is_not_taken_from_who_has_less(start: Any) -> None:
    """Where all that a greedy key has is busy, its next session is refused."""

    async def go() -> None:
        server = start(api_keys=["a", "b"], limits=Limits(max_sessions=2))

        def body(number: int) -> dict[str, Any]:
            return {"model": "echo", "prompt": "hi", "session_id": number, "interactive_mode": True}

        async with httpx.AsyncClient(base_url=server.url) as client:
            await client.post("/v1/chat/interactive", json=body(1), headers=bearer("a"))
            server.engine.held = True
            busy = asyncio.create_task(client.post("/v1/chat/interactive", json=body(1), headers=bearer("b")))
            while not server.engine.running:
                await asyncio.sleep(0.01)
            refused = await client.post("/v1/chat/interactive", json=body(2), headers=bearer("b"))
            assert refused.status_code == 503 and "--max-sessions" in refused.json()["error"]["message"]
            server.engine.held = False
            assert (await busy).status_code == 200
            again = await client.post("/v1/chat/interactive", json=body(1), headers=bearer("a"))
            assert again.json()["history_tokens"] > 0

    asyncio.run(asyncio.wait_for(go(), 60))


def test_responses_of_a_batch_are_its_keys(start: Any) -> None:
    server = start(api_keys=["a", "b"])
    a, b = client_of(server.v1, "a"), client_of(server.v1, "b")
    first = a.responses.create(model="echo", input="My secret.")
    body = {"model": "echo", "input": "Again.", "previous_response_id": first.id}
    lines = [line("r", "/v1/responses", **body)]
    mine = ended(a, create(a, lines, "/v1/responses").id)
    made = read(a, mine.output_file_id)["r"]["response"]["body"]["id"]
    assert a.responses.retrieve(made).id == made
    theirs = ended(b, create(b, lines, "/v1/responses").id)
    assert (theirs.request_counts.completed, theirs.request_counts.failed) == (0, 1)


def test_who_has_most_bytes_gives_way() -> None:
    store = Store(Limits(max_stored_bytes=100))
    store.put({"id": "mine"}, [], [], 30, "a")
    for i in range(4):
        store.put({"id": f"big{i}"}, [], [], 40, "b")
    assert store.get("mine", "a") and not store.get("mine", "b")
    assert [i for i in range(4) if store.get(f"big{i}", "b")] == [3]
    store.put({"id": "huge"}, [], [], 1000, "b")
    assert store.get("mine", "a") and not store.get("huge", "b")


def test_clients_of_a_proxy_are_one_beside_others_and_apart_among_themselves() -> None:
    shares, kept = Shares(), []
    for owner, count in (("proxy/1", 4), ("proxy/2.3", 1), ("proxy/2.4", 2), ("key", 3), ("", 1), ("proxy", 3)):
        shares.add(owner, count)
        kept += [(owner, f"{owner}-{i}") for i in range(count)]
    assert shares.greediest(kept) == "proxy/1-0"
    shares.add("proxy/1", -2)
    assert shares.greediest(kept) == "proxy/2.4-0"
    shares.add("proxy/2.4", -2)
    assert shares.greediest(kept) == "proxy-0"
    shares.add("key", 9)
    assert shares.greediest(kept) == "key-0" and shares.greediest([]) is None


def test_what_a_front_says_needs_both_keys() -> None:
    def told(key: str, node_key: str | None, before: str = "") -> str:
        scope: Any = {"headers": [(b"authorization", f"Bearer {key}".encode())]}
        return asks_for(scope, User("", told=before), node_key)

    assert told("a", "n") == told("a", "n") != told("a", "m") and told("a", "n") != told("b", "n")
    assert told("a", None) == "" and told("a", None, "0123456789abcdef") == "0123456789abcdef"
    assert told("a", "n", "0123456789abcdef") == told("a", "n") + ".0123456789abcdef"


@pytest.mark.parametrize("header", ["", "{", "[]", '{"owner": 3}', '{"owner": "../"}', '{"owner": ["a"]}', '"a"'])
def test_an_odd_header_makes_no_owner_but_ones_own(header: str) -> None:
    owners = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        owners.append(current_user().owner)

    async def go() -> None:
        scope = {"type": "http", KEY: b"a", "client": ("10.0.0.1", 1), "headers": [(HEADER.encode(), header.encode())]}
        await Users(app, ApiKeys(["a"]), Proxies([]), lambda key: f"<{key.decode()}>")(scope, None, None)  # type: ignore[arg-type]

    asyncio.run(go())
    (owner,) = owners
    assert owner == "<a>" or re.fullmatch("<a>/[0-9a-f]{64}", owner)
