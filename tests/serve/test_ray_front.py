"""What stands before replicas on Ray, with applications of this process in their places: nothing here needs Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from toolkit.base import ray as ray_here
from toolkit.base.record import plain
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.errors import ToolkitError, UsageError
from toolkit.quant import opening
from toolkit.serve.http.access.keys import ApiKeys
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.replies import json_response
from toolkit.serve.http.sharing.places import Places
from toolkit.serve.proxy.forward import Incoming
from toolkit.serve.proxy.strategies import Sent, uneven
from toolkit.serve.ray import replica as replica_module
from toolkit.serve.ray import run as run_module
from toolkit.serve.ray.asked import Asked
from toolkit.serve.ray.front import Busy, Fleet, Gone, create_app
from toolkit.serve.ray.metrics import merged
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.ray.plan import Model, Plan
from toolkit.serve.ray.replica import Message, Replica, answered

CHAT = "/v1/chat/completions"
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def body(text: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


@dataclass
class Fake:
    """Replicas of a model: each request gets the next of ``answers``, lists of messages and exceptions, the last one
    again and again."""

    name: str
    answers: list[list[Any]] = field(default_factory=list)
    adapters: Sequence[str] = ()
    healthy: bool = True
    seen: list[Asked] = field(default_factory=list)
    closed: int = 0

    async def stream(self, asked: Asked) -> AsyncGenerator[list[Message], None]:
        if asked.target in ("/v1/models", "/health"):
            told: Any = {"data": [{"id": name} for name in (self.name, *self.adapters)]}
            reply = json_response(told, 200 if self.healthy else 503)
            yield [{"type": "http.response.start", "status": reply.status_code, "headers": reply.raw_headers}]
            yield [body(bytes(reply.body), False)]
            return
        self.seen.append(asked)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        try:
            for message in answer:
                if isinstance(message, BaseException):
                    raise message
                yield [message]
                await asyncio.sleep(0)
        finally:
            self.closed += 1

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        return [(f"{self.name}-0", b"# TYPE vllm:x_total counter\nvllm:x_total 3.0\n")]


def whole(text: bytes = b"data: hi\n\n") -> list[Any]:
    return [START, body(text), body(b"", False)]


def client(*models: Fake, key: str | None = None, sent: str | None = None, **settings: Any) -> httpx.AsyncClient:
    app = create_app(RaySettings(**settings), ApiKeys([key] if key else []), {one.name: one for one in models})
    headers = {"authorization": f"Bearer {sent}"} if sent else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front", headers=headers)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_a_request_goes_to_its_models_replicas_and_its_answer_comes_back() -> None:
    async def go() -> None:
        a, b = Fake("a", [whole(b"data: a\n\n")], adapters=("tune",)), Fake("b", [whole(b"data: b\n\n")])
        async with client(a, b, key="secret", sent="secret") as http:
            for model, text in (("a", "data: a\n\n"), ("b", "data: b\n\n"), ("tune", "data: a\n\n")):
                found = await http.post(CHAT, json={"model": model, "messages": []})
                assert (found.status_code, found.text) == (200, text)
            assert (await http.post(CHAT, json={"messages": []})).text == "data: a\n\n"  # the first where none is named
            names = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
            assert names == ["a", "tune", "b"]
            assert (await http.get("/v1/models/b")).text == "data: b\n\n"
            unknown = await http.post(CHAT, json={"model": "c", "messages": []})
            assert unknown.status_code == 404 and "'a'" in unknown.json()["error"]["message"]
            assert (await http.get("/health")).json() == {"status": "healthy"}
            assert (await http.post("/terminate")).status_code == 404
        asked = a.seen[0]
        assert json.loads(asked.body)["model"] == "a"
        assert not {b"authorization", b"host"} & {name.lower() for name, _ in asked.headers}  # its key stays here

    run(go())


def test_requests_that_name_an_adapter_at_once_share_one_look_at_the_names() -> None:
    """None of them is told that there is no such name while the first one's look is under way."""

    @dataclass
    class Slow(Fake):
        looks: int = 0

        async def stream(self, asked: Asked) -> AsyncGenerator[list[Message], None]:
            if asked.target == "/v1/models":
                self.looks += 1
                await asyncio.sleep(0.05)
            async for messages in super().stream(asked):
                yield messages

    async def go() -> None:
        a, b = Slow("a", [whole()], adapters=("tune",)), Slow("b", [whole()])
        async with client(a, b) as http:
            found = await asyncio.gather(*(http.post(CHAT, json={"model": "tune"}) for _ in range(4)))
            assert ([one.status_code for one in found], a.looks, len(a.seen)) == ([200] * 4, 1, 4)
        a, b = Slow("a", [whole()]), Slow("b", [whole()], healthy=False)
        async with client(a, b) as http:
            found = await asyncio.gather(*(http.post(CHAT, json={"model": "tune"}) for _ in range(4)))
            assert [one.status_code for one in found] == [503] * 4  # b may have it

    run(go())


def test_names_may_be_listed_while_a_look_finds_more() -> None:
    """As /api/tags lists them, in a thread of its own."""

    class Models(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            fleet._names["more"] = "a"
            return super().__contains__(name)

    fleet = Fleet({"a": None}, 1, 1)  # type: ignore[dict-item]  # nobody asks it
    fleet._names, fleet.models = {"tune": "a"}, Models(fleet.models)
    assert fleet.names == ["a", "tune"]


def test_users_have_turns_at_the_places_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself serves first come, first served; and a full queue has room for who has little of it."""

    @dataclass
    class Held(Fake):
        door: asyncio.Event = field(default_factory=asyncio.Event)
        order: list[str] = field(default_factory=list)

        async def stream(self, asked: Asked) -> AsyncGenerator[list[Message], None]:
            self.order.append(json.loads(asked.body)["user"])
            await self.door.wait()
            yield whole()

    come: list[str] = []  # to the queue
    may_wait = Places.may_wait

    def seen(places: Places, user: str, most: int) -> bool:
        come.append(user)
        return may_wait(places, user, most)

    monkeypatch.setattr(Places, "may_wait", seen)

    async def go() -> None:
        model, keys = Held("a"), ApiKeys(["greedy", "modest"])
        app = create_app(RaySettings(max_ongoing_requests=1, limits=Limits(max_queue=4)), keys, {"a": model})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as http:

            async def ask(key: str) -> int:
                asked = {"model": "a", "messages": [], "user": key}
                return (await http.post(CHAT, json=asked, headers={"authorization": f"Bearer {key}"})).status_code

            tasks = [asyncio.create_task(ask("greedy")) for _ in range(7)]
            while sum(task.done() for task in tasks) < 2:
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(ask("modest")))
            while len(come) < 8:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)  # and it waits there
            model.door.set()
            assert sorted(await asyncio.gather(*tasks)) == [200] * 6 + [429] * 2
            assert model.order[:3].count("modest") == 1

    run(go())


def test_keys_are_asked_for_at_the_front() -> None:
    async def go() -> None:
        async with client(Fake("a", [whole()]), key="secret") as http:
            assert (await http.post(CHAT, json={})).status_code == 401
            assert (await http.get("/metrics")).status_code == 401
            assert (await http.get("/health")).status_code == 200

    run(go())


def test_a_replica_that_dies_ends_its_streams_with_an_event() -> None:
    async def go() -> None:
        one = Fake("a", [[START, body(b"data: half"), Gone("killed")]])
        async with client(one) as http:
            found = await http.post(CHAT, json={"model": "a"})
            last = found.text.rpartition("data: ")[2]
            assert found.status_code == 200 and found.text.startswith("data: half\n\n")
            assert json.loads(last)["error"]["code"] == "node_lost"
            assert len(one.seen) == 1  # half an answer is not asked again
            for path in ("/v1/messages", "/v1/responses"):
                found = await http.post(path, json={"model": "a"})
                named, data = found.text.split("\n")[-4:-2]
                assert named == ("event: error" if path == "/v1/messages" else "")  # by which Anthropic's clients know
                assert json.loads(data.removeprefix("data: "))["error"]["message"].startswith("the replica")
            lines = (await http.post("/v1/chat/interactive", json={"model": "a"})).text.splitlines()
            assert json.loads(lines[-1])["error"]["code"] == "node_lost"  # JSON lines, though they are called events

    run(go())


def test_half_a_whole_answer_is_asked_for_once_more(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has seen anything of it, and the log has a line for each replica that is gone."""

    async def go() -> None:
        head = {**START, "headers": [(b"content-type", b"application/json"), (b"content-length", b"9")]}
        one = Fake("a", [[head, body(b"{"), Gone("killed")], [head, body(b'{"a": '), body(b"10}", False)]])
        async with client(one) as http:
            assert (await http.post(CHAT, json={"model": "a"})).json() == {"a": 10}
            assert len(one.seen) == 2
            one.answers = [[head, Gone("killed")]]
            found = await http.post(CHAT, json={"model": "a"})
            assert (found.status_code, found.json()["error"]["code"]) == (503, "no_node")
        assert [(record.message, record.exc_info) for record in caplog.records] == [
            ("a replica is gone: killed", None)
        ] * 3

    run(go())


def test_what_fails_behind_a_whole_answer_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As where a mistake of a route is told first, and raised then."""

    async def go() -> None:
        async with client(Fake("a", [[*whole(b"data: x\n\n"), Gone("RuntimeError")]])) as http:
            found = await http.post(CHAT, json={"model": "a"})
            assert (found.status_code, found.text) == (200, "data: x\n\n")
        assert not caplog.records

    run(go())


@pytest.mark.parametrize("first", ["gone", "busy"])
def test_before_its_first_byte_an_answer_is_asked_for_once_more(first: str) -> None:
    async def go() -> None:
        refusal = [{**START, "status": 503}, body(b"{}", False)]
        one = Fake("a", [[Gone("killed")] if first == "gone" else refusal, whole()])
        async with client(one) as http:
            assert (await http.post(CHAT, json={"model": "a"})).text == "data: hi\n\n"
            assert len(one.seen) == 2 and one.closed == 2
            one.answers = [[Gone("killed")]]
            found = await http.post(CHAT, json={"model": "a"})
            assert (found.status_code, found.json()["error"]["code"]) == (503, "no_node")
            assert len(one.seen) == 4  # two and no more: it may be the request that kills them
            assert "toolkit_ray:retries_total 2.0" in (await http.get("/metrics")).text

    run(go())


def test_who_has_refused_is_not_asked_next() -> None:
    """Not for this request, nor for others in the next seconds; but for one whose history it has."""

    async def go() -> None:
        refusal = [{**START, "status": 503, "headers": [(b"x-toolkit-replica", b"r1")]}, body(b"{}", False)]
        one = Fake("a", [refusal, whole()])
        async with client(one) as http:
            await http.post(CHAT, json={"model": "a"})
            await http.post(CHAT, json={"model": "a"})
            assert [asked.avoid for asked in one.seen] == [frozenset(), {"r1"}, {"r1"}]
            one.answers = [refusal]
            await http.post("/v1/chat/interactive", json={"model": "a", "session_id": 7})
            assert [asked.avoid for asked in one.seen[3:]] == [frozenset(), frozenset()]

    run(go())


def test_a_second_refusal_is_the_answer() -> None:
    async def go() -> None:
        one = Fake("a", [[{**START, "status": 429}, body(b"no", False)]])
        async with client(one) as http:
            found = await http.post(CHAT, json={"model": "a"})
            assert (found.status_code, found.text, len(one.seen)) == (429, "no", 2)
            one.answers = [[Busy("64 requests wait")]]
            found = await http.post(CHAT, json={"model": "a"})
            assert found.status_code == 429 and "64 requests wait" in found.json()["error"]["message"]

    run(go())


def test_health_and_metrics_are_those_of_replicas() -> None:
    async def go() -> None:
        async with client(Fake("a", [whole()]), Fake("b", [whole()], healthy=False)) as http:
            found = await http.get("/health")
            assert found.status_code == 503 and found.json()["reason"].endswith(": b")
            await http.post(CHAT, json={"model": "a"})
            text = (await http.get("/metrics")).text
            families = {family.name: family for family in text_string_to_metric_families(text)}
            assert [(s.labels["replica"], s.value) for s in families["vllm:x"].samples] == [("a-0", 3.0), ("b-0", 3.0)]
            (counted,) = (s for s in families["toolkit_ray:requests"].samples if s.name.endswith("_total"))
            assert (counted.labels, counted.value) == ({"model": "a", "status": "200"}, 1.0)

    run(go())


def test_replicas_that_are_busy_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken: what is asked of replicas waits behind the answers under way."""
    monkeypatch.setattr("toolkit.serve.ray.front.LOOK_S", 0.05)

    async def go() -> None:
        model = Fake("a", [whole()], adapters=("tune",))
        stream = model.stream

        async def busy(asked: Asked) -> AsyncGenerator[list[Message], None]:
            if asked.target in ("/v1/models", "/health"):
                await asyncio.sleep(60)
            async with aclosing(stream(asked)) as messages:
                async for some in messages:
                    yield some

        async with client(model) as http:
            assert len((await http.get("/v1/models")).json()["data"]) == 2
            model.stream = busy  # type: ignore[method-assign]
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/v1/models")).status_code == 503
            await http.post(CHAT, json={"messages": []})
            assert (await http.get("/health")).json() == {"status": "healthy"}
            assert len((await http.get("/v1/models")).json()["data"]) == 2
            model.answers = [[START, Gone("it ended")]]
            await http.post(CHAT, json={"messages": []})
            assert (await http.get("/health")).status_code == 503

    run(go())


def test_metrics_of_one_name_stand_together() -> None:
    text = b'# TYPE h histogram\nh_bucket{le="1.0"} 1.0\nh_bucket{le="+Inf"} 2.0\nh_count 2.0\nh_sum 3.5\n'
    found = merged([("x", text), ("y", text)]).decode()
    assert found.count("# TYPE h histogram") == 1
    assert found.count('h_sum{replica="x"} 3.5') == found.count('h_sum{replica="y"} 3.5') == 1


def test_what_says_which_replica_is_best() -> None:
    def asked(headers: Any = (), path: str = CHAT, **data: Any) -> Asked:
        return Asked.of(Incoming("POST", path, list(headers), b"{}", data))

    long = [{"role": "user", "content": "x" * 2000}]
    one, other = asked(messages=long), asked(messages=[*long, {"role": "assistant", "content": "y"}])
    shared = [a for a, b in zip(one.prefixes, other.prefixes, strict=False) if a == b]
    assert len(shared) >= 3
    assert asked([(b"X-Session-Id", b"s")]).session == asked(prompt_cache_key="s").session == "s"
    assert asked(path="/v1/chat/interactive", session_id=7).session == "7"
    assert one.session == asked(path="/v1/chat/interactive", session_id=-1).session == ""
    sent = Sent()
    sent.note(one.prefixes, "r1")
    assert sent.find(other.prefixes, lambda place: True) == "r1"
    assert sent.find(other.prefixes, lambda place: place != "r1") is None
    assert uneven(3, 0) and not uneven(2, 0)


def test_an_application_hears_that_its_client_has_gone() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}" and dict(scope["headers"])[b"content-length"] == b"2"
        await send(START)
        while True:  # more than fits between: it is not held up for ever
            await send(body(b"x" * 10))
            heard[:] = [(await asyncio.wait_for(receive(), 0.001))["type"]] if heard == ["soon"] else heard
            if heard == ["http.disconnect"]:
                return

    async def go() -> None:
        async with aclosing(answered(app, Asked("POST", "/x?y=1", [], b"{}"))) as messages:
            async for some in messages:
                assert some
                heard[:] = ["soon"]
                break
            await asyncio.sleep(0)

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a mistake")

    async def fails() -> None:
        with pytest.raises(RuntimeError, match="a mistake"):
            async for _ in answered(failing, Asked("GET", "/x", [])):
                pass

    run(go())
    run(fails())


def artifact(path: Path, text: str = "{}") -> Path:
    path.mkdir()
    (path / "config.json").write_text(text)
    return path


def test_a_plan_is_what_its_file_says(tmp_path: Path) -> None:
    one, other = artifact(tmp_path / "one"), artifact(tmp_path / "two")
    settings = RaySettings(replicas="1:3", api_keys=["secret"], limits=Limits(max_queue=7), server_port=9000)
    plan = Plan.of([str(one), str(other)], TurbomindEngineConfig(session_len=64), None, settings)
    told = json.loads(plan.config_file())
    (application,) = told["applications"]
    assert application["import_path"] == "toolkit.serve.ray:build" and told["http_options"]["port"] == 9000
    assert "secret" not in plan.config_file()
    again = Plan.of_json(application["args"])
    assert again.models == plan.models and again.models[0].engine == TurbomindEngineConfig(session_len=64)
    assert again.settings.limits == Limits(max_queue=7) and again.settings.bounds == (1, 3)
    assert [model.name for model in again.models] == ["one", "two"]
    for spoiled in ({}, {"models": [], "settings": {}}, {**application["args"], "more": 1}):
        with pytest.raises(UsageError, match="args"):
            Plan.of_json(spoiled)


def test_replicas_find_what_is_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their working directory is that of ``ray start``."""
    monkeypatch.chdir(tmp_path)
    artifact(Path("one"))
    for name in ("tune", "auto"):
        Path(name).mkdir()
    Path("a.jinja").write_text("{{ messages }}")
    config = TurbomindEngineConfig(
        adapters={"tune": "tune", "other": "owner/tune"}, kv_cache_dir="kept", speculative_draft_model="owner/small"
    )
    Path("pictures").mkdir()
    settings = RaySettings(
        adapter_dir=Path("tune"), api_key_file=Path("keys"), allowed_local_media_path=Path("pictures")
    )
    plan = Plan.of(["one"], config, "a.jinja", settings)
    (model,) = plan.models
    assert (model.model, model.chat_template) == (str(tmp_path / "one"), str(tmp_path / "a.jinja"))
    assert model.engine == replace(
        config, adapters={"tune": str(tmp_path / "tune"), "other": "owner/tune"}, kv_cache_dir=str(tmp_path / "kept")
    )
    assert plan.settings == replace(
        settings,
        adapter_dir=tmp_path / "tune",
        api_key_file=tmp_path / "keys",
        allowed_local_media_path=tmp_path / "pictures",
    )


def test_replicas_are_told_what_requests_may_show() -> None:
    told = {
        "allowed_media_domains": ["pictures.example"],
        "allow_private_media": True,
        "media_io_kwargs": '{"video": {"num_frames": 4}}',
        "limit_mm_per_prompt": '{"image": 2}',
    }
    settings = RaySettings(**told)
    settings.check()
    assert {name: getattr(settings.of_replica("tiny"), name) for name in told} == told


def test_a_replica_has_the_adapters_of_its_folder_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be for one of them, as where it has come up under load."""
    folder, loaded = tmp_path / "adapters", dict[str, Path]()
    (folder / "tune").mkdir(parents=True)
    (folder / "tune" / "adapter_config.json").write_text("{}")
    adapters = SimpleNamespace(load=lambda name, path: None)
    engine = SimpleNamespace(close=lambda: None, healthy=True, adapters=adapters)
    state = SimpleNamespace(model_names=("one",), settings=SimpleNamespace(adapters=()), engine=engine, loaded=loaded)
    state.adapter_turn = threading.Lock()
    monkeypatch.setattr(replica_module, "check", lambda *given: None)
    monkeypatch.setattr(replica_module, "Renderer", lambda: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(replica_module.AsyncEngine, "open", lambda *given, **more: engine)
    monkeypatch.setattr(
        replica_module, "app_of", lambda *given, **more: SimpleNamespace(state=SimpleNamespace(server=state))
    )
    model = Model.of(str(artifact(tmp_path / "one")), TurbomindEngineConfig(), None)
    Replica(plain(model), plain(RaySettings(adapter_dir=folder)), "r1")
    assert loaded == {"tune": folder / "tune"}


def test_a_replica_with_other_files_says_so(tmp_path: Path) -> None:
    path = artifact(tmp_path / "one")
    model = Model.of(str(path), TurbomindEngineConfig(), None)
    model.check_files()
    (path / "config.json").write_text('{"a": 1}')
    with pytest.raises(ToolkitError, match="not what it is where the deployment was made"):
        model.check_files()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"replicas": "3:1"}, "a MIN of 3 and a MAX of 1"),
        ({"replicas": "0"}, "1 <= MIN"),
        ({"replicas": "many"}, "MIN:MAX"),
        ({"replicas": "1:2", "target_ongoing_requests": 65}, "--max-ongoing-requests"),
        ({"strategy": "best"}, "power_of_two"),
        ({"key_share": 2}, "--key-share"),
        ({"allow_private_media": True}, "--allowed-media-domains"),
        ({"limit_mm_per_prompt": '{"image": 1000}'}, "--max-images"),
    ],
)
def test_options_that_mean_nothing(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        RaySettings(**given).check()


@pytest.mark.parametrize("found", [None, "2.9.3", "2.60.0", "3.0.0.dev0"])
def test_without_ray_the_message_says_how_to_get_it(
    found: str | None, monkeypatch: pytest.MonkeyPatch, support: Any, tmp_path: Path
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise ray_here.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(ray_here, "version", version)
    told = ray_here.why_no_ray()
    assert (told is None) == (found in ("2.60.0", "3.0.0.dev0"))
    if told is None:
        return
    monkeypatch.setattr(opening, "resolve_model", lambda *given, **more: pytest.fail("it is fetched"))
    for command in (
        ["serve", "ray", "demo"],
        ["batch", "a", "b", "--model", "demo", "--ray", "2"],
        ["lite", "mxfp4", "demo", "--ray", "2"],
    ):
        done = support("command").tool(*command)
        assert done.returncode == 2 and "[ray]'" in done.stderr
        assert ("2.9.3 is installed, expected 2.60" in done.stderr) == (found == "2.9.3")


@pytest.mark.parametrize(
    ("token", "mode", "imported", "expected"),
    [(True, None, False, "token"), (False, None, False, None), (True, "k8s", False, "k8s"), (True, None, True, None)],
)
def test_a_token_is_shown_to_a_cluster_that_is_there(
    token: bool,
    mode: str | None,
    imported: bool,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(ray_here, "why_no_ray", lambda: None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    if imported:  # it has read its environment
        monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever is set below
        monkeypatch.delenv(name)
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("a" * 64)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    ray_here.check_ray("--ray")
    assert os.environ.get("RAY_AUTH_MODE") == expected


class Rayless:
    """Ray, as far as ``run.serve`` sees it. ``states``: of the application, one a look, None = it has ended; the last
    one again and again. Deleting it takes longer than Ray waits. ``did``: what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *states: str | None, message: str = "") -> None:
        self.states, self.did = list(states), list[str]()
        self._message = message
        serve, ray, application = (ModuleType(name) for name in ("ray.serve", "ray", "toolkit.serve.ray.application"))
        vars(serve).update(start=lambda **given: None, RunTarget=dict, run_many=lambda targets, **given: None)
        vars(serve).update(status=self._status, delete=self._delete)
        vars(ray).update(serve=serve, shutdown=lambda: self.did.append("shutdown"))
        vars(application).update(application=lambda plan: None)
        for module in (serve, ray, application):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for name, value in (("check_ray", str), ("connect", lambda *a, **given: None), ("LOOK_S", 0.0)):
            monkeypatch.setattr(run_module, name, value)

    def _status(self) -> Any:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        one = SimpleNamespace(message=self._message)
        found = SimpleNamespace(status=SimpleNamespace(value=state), message="", deployments={"one": one})
        return SimpleNamespace(applications={} if state is None else {"toolkit": found})

    def _delete(self, name: str) -> None:
        self.did.append("delete")
        raise TimeoutError

    def serve(self, model: Path, stop: str = "ready", **settings: Any) -> None:
        """With a SIGTERM when it says what begins with ``stop``."""

        def said(line: str) -> None:
            self.did.append(line)
            if line.startswith(stop):
                os.kill(os.getpid(), signal.SIGTERM)

        plan = Plan.of([str(model)], TurbomindEngineConfig(), None, RaySettings(server_port=0, **settings))
        run_module.serve(plan, lambda url: said("ready"), said)


def test_answers_have_the_grace_period_however_long_ray_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Rayless(monkeypatch, "DEPLOYING", "RUNNING", "DELETING", "DELETING", "DELETING", None)
    ray.serve(artifact(tmp_path / "one"))
    assert ray.did[2:] == ["ready", "stopping; requests in flight may end", "delete", "shutdown"]
    assert ray.states == [None]


def test_what_is_ended_before_it_is_ready_never_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Rayless(monkeypatch, "DEPLOYING")
    ray.serve(artifact(tmp_path / "one"), stop="starting 1 replicas")
    assert ray.did == ["starting Ray", "starting 1 replicas of one", "shutdown"]


def test_what_replicas_wait_for_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Rayless(monkeypatch, *["DEPLOYING"] * 4, "RUNNING", None, message="no node\nhas a GPU")
    monkeypatch.setattr(run_module, "PATIENCE_S", 0.0)
    ray.serve(artifact(tmp_path / "one"))
    assert ray.did.count("no node has a GPU") == 1


def test_a_program_at_the_port_that_speaks_no_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster whose Serve was started with another address."""
    monkeypatch.setattr(run_module, "LOOK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            for _ in range(10):
                one, _ = server.accept()
                with one:
                    one.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                    one.recv(1 << 10)

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(ToolkitError, match=r"does not answer there \(SSH-2.0-OpenSSH_9.6\)"):
            run_module._check_address(f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("kind", [UsageError, ToolkitError])
def test_what_keeps_replicas_from_starting_stays_what_it_is(
    kind: type[ToolkitError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Rayless(monkeypatch, "DEPLOY_FAILED", message=f"a trace\ntoolkit.errors.{kind.__name__}: a: wrong\nmore")
    with pytest.raises(ToolkitError) as told:
        ray.serve(artifact(tmp_path / "one"))
    assert type(told.value) is kind and str(told.value) == "a: wrong"


def test_the_command_refuses_what_it_cannot_do_before_it_starts_anything(support: Any, tmp_path: Path) -> None:
    tool, model = support("command").tool, artifact(tmp_path / "one")
    done = tool("serve", "ray", "demo", "--replicas", "3:1")
    assert done.returncode == 2 and "--replicas" in done.stderr
    done = tool("batch", "a", "b", "--model", "demo", "--cpus", "2")
    assert done.returncode == 2 and "--cpus: only with --ray" in done.stderr
    done = tool("serve", "ray", model, "--write-config", tmp_path / "no" / "x.yaml")
    assert done.returncode == 2 and "--write-config" in done.stderr
    done = tool("serve", "ray", model, model, "--write-config", tmp_path / "x.yaml")
    assert done.returncode == 2 and "another model is called one" in done.stderr
    done = tool("serve", "ray", model, "--chat-template", "no.jinja", "--write-config", tmp_path / "x.yaml")
    assert done.returncode == 2 and "no.jinja" in done.stderr
    done = tool("serve", "ray", model, "--write-config", tmp_path / "x.yaml")
    assert done.returncode == 0 and json.loads((tmp_path / "x.yaml").read_text())["applications"]
