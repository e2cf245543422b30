"""Whose a request is, what the operator allows to each key, and who is believed to be a proxy."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UsageError
from toolkit.messages import Response
from toolkit.serve.http.access.keys import ApiKeys, KeyRules
from toolkit.serve.http.access.proxies import Proxies
from toolkit.serve.http.access.quotas import Quotas
from toolkit.serve.http.access.users import HEADER, User, header_of
from toolkit.serve.http.errors import ApiError

BODY = {"model": "echo", "prompt": "a"}
ALICE = header_of(User("alice's", "alice", KeyRules("alice", weight=2.0, priority=-5)), "", True)


class Client:
    """One connection, kept."""

    def __init__(self, url: str, **headers: str) -> None:
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        self.headers = headers

    def post(self, body: dict[str, Any] | None = None, path: str = "/v1/completions") -> tuple[int, Any, Any]:
        self.connection.request("POST", path, json.dumps(body or BODY), self.headers)
        reply = self.connection.getresponse()
        return reply.status, json.loads(reply.read()), reply.headers


def keyed(url: str, key: str, **more: str) -> Client:
    return Client(url, Authorization=f"Bearer {key}", **more)


def test_a_user_is_a_connection_and_a_request_a_group(start: Any) -> None:
    server = start()
    one, other = Client(server.url), Client(server.url)
    for client in (one, one, other):
        assert client.post({**BODY, "n": 2})[0] == 200
    users = [w.user for w in server.engine.whose]
    assert users[0] == users[1] == users[2] == users[3] != users[4] == users[5]
    groups = [w.group for w in server.engine.whose]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_a_user_is_a_key_on_whatever_connection(start: Any) -> None:
    server = start(api_keys=["first", "second"], key_share=0.5)
    for key in ("first", "first", "second"):
        assert keyed(server.url, key).post()[0] == 200
    users = [w.user for w in server.engine.whose]
    assert users[0] == users[1] != users[2] and "first" not in users[0]
    assert {w.share for w in server.engine.whose} == {0.5}


def test_only_a_trusted_proxy_says_whose_a_request_is(start: Any) -> None:
    told = {HEADER: ALICE[1].decode()}
    server = start()
    assert Client(server.url, **told).post()[0] == 200
    assert server.engine.whose[-1].user.startswith("127.0.0.1:") and server.engine.whose[-1].weight == 1
    believes = start(trusted_proxy=["127.0.0.0/8"])
    assert Client(believes.url, **told).post({**BODY, "priority": -5})[0] == 200
    assert (believes.engine.whose[-1].user, believes.engine.whose[-1].weight) == ("alice's", 2.0)
    for bad in (
        "",
        "{",
        "[]",
        '{"id": 1, "weight": 1e9}',
        '{"id": "x", "weight": NaN}',
        '{"id":"x","requests":"many"}',
    ):
        assert Client(believes.url, **{HEADER: bad}).post()[0] == 200
        assert believes.engine.whose[-1].user.startswith("127.0.0.1:")


def test_what_is_no_address_is_refused() -> None:
    assert "10.1.2.3" in Proxies(["10.0.0.0/8"]) and "::1" not in Proxies(["10.0.0.0/8"]) and None not in Proxies([])
    with pytest.raises(UsageError, match="--trusted-proxy: expected an address"):
        Proxies(["proxy.example"])


@pytest.mark.parametrize(
    ("lowest", "asked", "status"), [(0, -1, 400), (0, 0, 200), (0, 7, 200), (-10, -10, 200), (-10, -11, 400)]
)
def test_clients_may_lower_themselves_alone_unless_the_operator_says_more(
    start: Any, lowest: int, asked: int, status: int
) -> None:
    server = start(lowest_priority=lowest)
    for path, body in (
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"model": "echo", "messages": "a"}),
        ("/generate", {"prompt": "a"}),
    ):
        found, said, _ = Client(server.url).post({**body, "priority": asked}, path)
        assert found == status, said
        assert status == 200 or "--lowest-priority" in said["error"]["message"]
    assert server.engine.priorities == [asked] * (3 if status == 200 else 0)


@pytest.mark.parametrize("shared", ["all", "user"])
def test_keys_share_the_prefix_cache_unless_the_operator_says_no(start: Any, shared: str) -> None:
    """Beside that, whoever sends a salt shares with the same salt alone."""
    server = start(api_keys=["one", "two"], prefix_cache_shared=shared)
    asked = [("one", None), ("one", None), ("two", None), ("one", "a"), ("two", "a")]
    for key, salt in asked:
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", {"model": "echo", "messages": "a"}),
            ("/generate", {"prompt": "a"}),
        ):
            found, said, _ = keyed(server.url, key).post({**body, "cache_salt": salt}, path)
            assert found == 200, said
    one, again, two, salted, other = (server.engine.salts[i : i + 3] for i in range(0, 15, 3))
    assert one == again and all(len(set(each)) == 1 for each in (one, two, salted, other))
    assert one != salted and two != other
    assert (one == two) == (salted == other) == (shared == "all")


def test_a_key_s_line_says_what_it_may(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "# ours\nplain\nvip name=vip weight=4 priority=-50 # paid\n"
        "small name=small requests=1 tokens-per-minute=10 share=0.2\n"
    )
    server = start(api_key_file=file)
    assert keyed(server.url, "plain").post({**BODY, "priority": -1})[0] == 400
    assert keyed(server.url, "vip").post({**BODY, "priority": -50})[0] == 200
    assert server.engine.whose[-1].weight == 4
    small = keyed(server.url, "small")
    assert small.post({**BODY, "prompt": "a prompt of more than ten"})[0] == 200
    assert server.engine.whose[-1].share == 0.2
    status, said, headers = small.post()
    assert status == 429 and said["error"]["code"] == "key_tokens_per_minute" and int(headers["retry-after"]) > 60
    small.connection.request("GET", "/metrics", headers=small.headers)
    text = small.connection.getresponse().read().decode()
    assert 'toolkit:user_wait_seconds_count{user="small"} 1.0' in text
    assert 'toolkit:user_refused_total{limit="key_tokens_per_minute",user="small"} 1.0' in text


def test_an_end_token_is_used_as_any_other(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "keys").write_text("small name=small tokens-per-minute=4\n")
    server = start(api_key_file=file)

    async def ends(token_ids: list[int], *given: Any, **more: Any) -> AsyncIterator[Response]:
        yield Response("a", 1, len(token_ids), token_ids=[97])
        yield Response("", 2, len(token_ids), "stop")

    monkeypatch.setattr(server.engine, "generate", ends)
    monkeypatch.setattr(server.app.state.server.quotas, "_clock", lambda: 0.0)  # no token comes back meanwhile
    small = keyed(server.url, "small")
    status, said, _ = small.post({"prompt": "ab"})
    assert status == 200 and said["usage"]["total_tokens"] == 4
    small.connection.request("GET", "/metrics", headers=small.headers)
    assert "toolkit:generation_tokens_total 2.0" in small.connection.getresponse().read().decode()
    assert small.post({"prompt": "ab"})[0] == 429


@pytest.mark.parametrize(
    "line",
    [
        "secret colour=red",
        "secret weight=heavy",
        "secret weight=1e9",
        "secret requests=0",
        "secret two",
        "secret name=a/b",
    ],
)
def test_a_line_that_cannot_be_read_is_named_but_not_its_key(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good\n{line}\n")
    with pytest.raises(UsageError, match="line 2: ") as told:
        ApiKeys(file=file)
    assert "secret" not in str(told.value)


def test_tokens_of_a_minute_come_back_steadily() -> None:
    now, refused = 0.0, []
    quotas = Quotas(1, 60, lambda *what: refused.append(what), lambda: now)
    user, other = User("x", "alice"), User("y", "bob")

    async def enter(who: User = user) -> None:
        quotas.enter(who)

    async def run() -> None:
        nonlocal now
        await enter()
        quotas.spend(user, 90)
        with pytest.raises(ApiError, match="60 tokens a minute") as told:
            await asyncio.create_task(enter())
        assert told.value.headers == {"retry-after": "31"}
        await asyncio.create_task(enter(other))
        now = 31.0
        with pytest.raises(ApiError, match="1 requests of this key") as told:  # the first is this task's, and runs
            await asyncio.create_task(enter())
        await asyncio.create_task(enter(User("", "")))

    asyncio.run(run())
    assert refused == [("alice", "key_tokens_per_minute"), ("alice", "key_requests")]
    asyncio.run(enter())  # both have ended
