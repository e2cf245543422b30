"""Several models on one port: what is loaded when, what goes for what, and what the front says of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import httpx2 as httpx
import psutil
import pytest

from tests.serve.test_proxy import FakeNode
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.configs.option import read_size
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.fleet.app import create_app
from toolkit.serve.fleet.catalog import Listed, listed
from toolkit.serve.fleet.child import Launcher, Spare
from toolkit.serve.fleet.fleet import LOOK_S, Fleet
from toolkit.serve.fleet.unloaded import shown
from toolkit.serve.http.errors import ApiError
from toolkit.serve.options import ProxySettings, ServerSettings
from toolkit.serve.run import serve

COMMAND = [sys.executable, "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]


class FakeServer:
    """Notes what is done to it."""

    def __init__(self, name: str, memory: int, note: Callable[[str], None]) -> None:
        self.url, self.memory, self._name, self._note = f"http://{name}:1", memory, name, note
        self.up = True

    def alive(self) -> bool:
        return self.up

    def sleep(self) -> None:
        self._note(f"sleep {self._name}")

    def wake(self) -> None:
        self._note(f"wake {self._name}")

    def close(self) -> None:
        self._note(f"close {self._name}")


def fleet(
    tmp_path: Path,
    *names: str,
    fail: str = "",
    slow: str = "",
    go_on: Any = None,
    at: dict[str, str] | None = None,
    **options: Any,
) -> tuple[Fleet, list[str]]:
    """Models of 10 bytes of files each, that take 40 once they are loaded; ``slow`` waits for the event ``go_on``;
    ``at``: where the server of one is, if it is one."""
    models, log = [], []

    def note(what: str) -> None:
        log.append(what)
        assert what != slow or go_on.wait(60)

    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"0123456789")
        models.append(Listed(name, str(tmp_path / name), {f"{name}-adapter": "x"}, (f"{name}-alias",)))

    def launch(model: Listed) -> FakeServer:
        assert threading.current_thread() is not threading.main_thread()
        note(f"load {model.name}")
        if model.name == fail:
            raise ToolkitError("broken")
        server = FakeServer(model.name, 40, note)
        server.url = (at or {}).get(model.name, server.url)
        return server

    return Fleet(models, launch, **options), log


def run(go: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(go(), 100))


async def use(found: Fleet, name: str | None, over: asyncio.Event | None = None) -> str:
    async with found.using(name) as server:
        if over is not None:
            await over.wait()
        return server.url


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def passes(seconds: float) -> None:
    """Whoever looks every so often has looked, in the loop's own time."""
    ends = asyncio.get_running_loop().time() + seconds
    await until(lambda: asyncio.get_running_loop().time() > ends)


def test_models_are_loaded_once_and_when_asked_for(tmp_path: Path) -> None:
    found, log = fleet(tmp_path, "a", "b")

    async def go() -> None:
        assert [card["state"] for card in found.cards()] == ["unloaded"] * 6
        urls = await asyncio.gather(*(use(found, name) for name in ("a", "a-alias", "a-adapter", None, "a")))
        assert set(urls) == {"http://a:1"} and log == ["load a"]
        assert {card["name"]: card["state"] for card in found.cards()}["a-alias"] == "loaded"
        assert next(card for card in found.cards() if card["name"] == "a-adapter")["parent"] == "a"
        with pytest.raises(ApiError, match="this server has 'a', 'a-alias', 'a-adapter', 'b'"):
            await use(found, "c")
        await found.close()
        assert log == ["load a", "close a"]

    run(go)


def test_the_one_used_longest_ago_makes_room(tmp_path: Path) -> None:
    found, log = fleet(tmp_path, "a", "b", "c", budget=85)

    async def go() -> None:
        for name in ("a", "b", "a", "c", "a", "b"):
            await use(found, name)
        assert log == ["load a", "load b", "sleep b", "load c", "sleep c", "wake b"]
        assert [card["state"] for card in found.cards()[::3]] == ["loaded", "loaded", "sleeping"]

    run(go)


def test_what_a_model_takes_counts_once_it_is_known(tmp_path: Path) -> None:
    found, log = fleet(tmp_path, "a", "b", budget=60)  # 40 and 10, by its files; and then 40 and 40

    async def go() -> None:
        await use(found, "a")
        await use(found, "b")
        assert log == ["load a", "load b", "sleep a"]

    run(go)


def test_what_runs_ends_before_its_model_sleeps(tmp_path: Path) -> None:
    found, log = fleet(tmp_path, "a", "b", budget=45)

    async def go() -> None:
        await use(found, "a")
        over = asyncio.Event()
        long = asyncio.create_task(use(found, "a", over))
        await until(lambda: found.models[0].users == 1)
        other = asyncio.create_task(use(found, "b"))
        await until(lambda: found.models[0].leaving)
        assert log == ["load a"] and not other.done()
        assert await use(found, "a") == "http://a:1"  # a cannot leave: who comes costs nobody any time
        second = asyncio.Event()
        guest = asyncio.create_task(use(found, "a", second))
        await until(lambda: found.models[0].users == 2)
        over.set()
        await until(lambda: found.models[0].closed)
        late = asyncio.create_task(use(found, "a"))
        await until(lambda: len(found._tasks) == 2)  # after the other, it waits for its turn
        assert log == ["load a"] and not (late.done() or guest.done())
        second.set()
        await asyncio.gather(long, guest, other, late)
        assert log == ["load a", "sleep a", "load b", "sleep b", "wake a"]
        assert not found.models[0].guests and found.models[0].users == 0

    run(go)


def test_who_came_meanwhile_has_a_while(tmp_path: Path) -> None:
    """Only they are ended, and only once the others are done; a client that leaves just then has left."""
    clock = [0.0]
    found, log = fleet(tmp_path, "a", "b", budget=45, swap_patience=10, clock=lambda: clock[0])

    async def go() -> None:
        await use(found, "a")
        over, never = asyncio.Event(), asyncio.Event()
        long = asyncio.create_task(use(found, "a", over))
        await until(lambda: found.models[0].users == 1)
        other = asyncio.create_task(use(found, "b"))
        await until(lambda: found.models[0].leaving)
        guests = [asyncio.create_task(use(found, "a", never)) for _ in range(2)]
        await until(lambda: found.models[0].users == 3)
        clock[0] += 11
        await passes(2 * LOOK_S)  # it looks again
        assert not any(task.done() for task in (long, other, *guests))
        over.set()
        await until(lambda: found.models[0].closed)
        clock[0] += 11
        guests[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await guests[1]
        with pytest.raises(ApiError, match="--swap-patience") as told:
            await guests[0]
        assert told.value.status == 503 and told.value.code == "model_swapped"
        await asyncio.gather(long, other)
        assert log == ["load a", "sleep a", "load b"] and found.models[0].users == 0

    run(go)


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_ended_before_its_first_byte_waits_for_the_next_turn(tmp_path: Path, stream: bool) -> None:
    """A stream that has begun is told in an event of its own."""

    async def go() -> None:
        first, second = FakeNode(go_on=asyncio.Semaphore(0)), FakeNode()
        for node in (first, second):
            await node.start()
        found, log = fleet(tmp_path, "a", "b", at={"a": first.url, "b": second.url}, budget=45, swap_patience=0.2)
        app, begun = create_app(found, ProxySettings(node_key="inner"), lambda model: {}), asyncio.Event()

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def noting(message: Any) -> None:
                await send(message)
                if message.get("body"):
                    begun.set()

            await app(scope, receive, noting)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(watched), base_url="http://front") as client:

            async def ask(name: str, **more: Any) -> httpx.Response:
                return await client.post("/v1/completions", json={"model": name, **more}, timeout=60)

            async def held(name: str, over: asyncio.Event) -> None:
                async with found.using(name):
                    await over.wait()

            over = asyncio.Event()
            old = asyncio.create_task(held("a", over))
            await until(lambda: found.models[0].users == 1)
            other = asyncio.create_task(ask("b"))
            await until(lambda: found.models[0].leaving)
            guest = asyncio.create_task(ask("a", stream=stream))
            if stream:
                first.go_on.release()  # type: ignore[union-attr]
                await begun.wait()
            await until(lambda: len(first.posts) == 1)
            over.set()
            assert (await other).status_code == 200
            if stream:
                told = (await guest).text
                assert "model_swapped" in told and len(first.posts) == 1
            else:
                for _ in range(9):
                    first.go_on.release()  # type: ignore[union-attr]
                assert (await guest).status_code == 200 and len(first.posts) == 2
                assert log == ["load a", "sleep a", "load b", "sleep b", "wake a"]
            await old
        await app.state.server.http.aclose()
        for node in (first, second):
            node.kill()

    run(go)


@pytest.mark.parametrize("during", ["load b", "sleep a", "wake a"])
def test_a_client_that_leaves_breaks_nothing(tmp_path: Path, during: str) -> None:
    """What is told of each model is true after a client has gone in the middle of a load, a sleep or a waking."""
    go_on = threading.Event()
    found, log = fleet(tmp_path, "a", "b", budget=45, slow=during, go_on=go_on)

    async def go() -> None:
        await use(found, "a")
        if during == "wake a":
            await use(found, "b")
        leaver = asyncio.create_task(use(found, during[-1] if during != "sleep a" else "b"))
        await until(lambda: during in log)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        await asyncio.gather(use(found, "a"), use(found, "b"))
        assert log.count("load a") == log.count("load b") == 1 and not any("close" in line for line in log)
        assert [model.users for model in found.models] == [0, 0]
        for model in found.models:
            last = [line.split()[0] for line in log if line.endswith(model.listed.name)][-1]
            assert (model.state == "sleeping") == (last == "sleep")
        await found.close()
        assert log.count("close a") == log.count("close b") == 1

    run(go)


def test_a_client_that_leaves_does_not_end_the_load_of_others(tmp_path: Path) -> None:
    go_on = threading.Event()
    found, log = fleet(tmp_path, "a", fail="a", slow="load a", go_on=go_on)

    async def go() -> None:
        leaver = asyncio.create_task(use(found, "a"))
        await until(lambda: bool(log))
        leaver.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        with pytest.raises(ApiError, match="cannot be loaded"):
            await use(found, "a")
        assert found.models[0].users == 0 and found.models[0].state == "unloaded"

    run(go)


def test_more_requests_than_are_answered_at_once_wait(tmp_path: Path) -> None:
    found, log = fleet(tmp_path, "a", "b", at_once=2)

    async def go() -> None:
        over = asyncio.Event()
        two = [asyncio.create_task(use(found, name, over)) for name in ("a", "a")]
        await until(lambda: found.models[0].users == 2)
        third = asyncio.create_task(use(found, "b"))
        await until(lambda: bool(found._slots._waiting))  # type: ignore[union-attr]
        assert log == ["load a"] and not third.done()
        over.set()
        await asyncio.gather(*two, third)
        assert log == ["load a", "load b"]

    run(go)


def test_an_unused_model_is_ended_in_time(tmp_path: Path) -> None:
    found, log = fleet(tmp_path, "a", "b", idle_timeout=0.2)
    gone: list[str] = []
    found.on_end = gone.append

    async def go() -> None:
        watching = asyncio.create_task(found.watch())
        over = asyncio.Event()
        busy = asyncio.create_task(use(found, "b", over))
        await use(found, "a")
        await until(lambda: bool(gone))
        await asyncio.sleep(0.5)
        assert log.count("close a") == 1 and "close b" not in log
        watching.cancel()
        over.set()
        await busy
        await use(found, "a")
        assert log.count("load a") == 2 and gone == ["http://a:1"]

    run(go)


def test_one_that_is_used_while_another_loads_is_not_ended_behind_it(tmp_path: Path) -> None:
    now, go_on = [0.0], threading.Event()
    found, log = fleet(tmp_path, "a", "b", slow="load b", go_on=go_on, idle_timeout=0.2, clock=lambda: now[0])

    async def go() -> None:
        watching = asyncio.create_task(found.watch())
        await use(found, "a")
        loading = asyncio.create_task(use(found, "b"))
        await until(lambda: "load b" in log)
        now[0] = 1.0
        await passes(0.5)  # now it waits to end a model that was not used for long
        await use(found, "a")
        go_on.set()
        await loading
        await passes(0.5)
        watching.cancel()
        assert log == ["load a", "load b"]

    run(go)


def test_a_model_that_cannot_be_loaded_is_a_503_and_is_tried_again(tmp_path: Path) -> None:
    found, log = fleet(tmp_path, "a", fail="a")

    async def go() -> None:
        for _ in range(2):
            with pytest.raises(ApiError, match="a: cannot be loaded: broken") as raised:
                await use(found, "a")
            assert raised.value.status == 503
        assert log == ["load a", "load a"] and found.models[0].users == 0

    run(go)


def test_a_model_whose_process_died_is_loaded_anew(tmp_path: Path) -> None:
    found, log = fleet(tmp_path, "a")

    async def go() -> None:
        await use(found, "a")
        found.models[0].server.up = False  # type: ignore[union-attr]
        await use(found, "a")
        assert log == ["load a", "close a", "load a"]

    run(go)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/v1/../terminate"),
        ("POST", "/v1/%2e%2e/terminate"),
        ("POST", "/v1/%252e%252e/sleep"),
        ("POST", "/v1/a%3fb"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/nonsense"),
    ],
)
def test_what_does_not_go_through_loads_nothing(tmp_path: Path, method: str, target: str) -> None:
    """Paths that hide another one, and what names no model."""
    found, log = fleet(tmp_path, "a")

    async def go() -> None:
        path, sent = unquote(target), []
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            sent.append(message)

        await create_app(found, ProxySettings(), lambda model: {})(scope, receive, send)
        assert sent[0]["status"] == 404 and log == []

    run(go)


@pytest.mark.parametrize(
    ("closing", "code", "told"),
    [
        (True, "shutting_down", "the server is shutting down; ask again later"),
        (False, "engine_unavailable", "the model's server failed ("),  # nobody listens at its address
    ],
)
def test_a_request_that_no_server_answers(tmp_path: Path, closing: bool, code: str, told: str) -> None:
    found, _ = fleet(tmp_path, "a", at={"a": "http://127.0.0.1:1"})
    app = create_app(found, ProxySettings(node_key="inner"), lambda model: {})
    app.state.server.closing = closing

    async def go() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            reply = await client.post("/v1/completions", json={"model": "a"}, timeout=60)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (503, code) and error["message"].startswith(told)

    run(go)


def test_a_broken_model_is_not_shown(tmp_path: Path) -> None:
    def show(model: Any) -> dict[str, Any]:
        raise ToolkitError("config.json is missing")

    app = create_app(fleet(tmp_path, "a")[0], ProxySettings(), show)

    async def go() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            reply = await client.post("/api/show", json={"model": "a"}, timeout=60)
        assert reply.status_code == 503 and "a: config.json is missing" in reply.text

    run(go)


# -- which models there are -------------------------------------------------------------------------------


def model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_what_lies_in_a_directory(tmp_path: Path) -> None:
    one, two = model(tmp_path / "one"), model(tmp_path / "dir" / "two")
    model(tmp_path / "dir" / ".hidden")
    (tmp_path / "dir" / "three.gguf").write_bytes(b"x" * 7)
    (tmp_path / "dir" / "mmproj-three.gguf").write_bytes(b"x")  # what it sees with is no model
    for part in range(1, 12):  # one model, if any
        (tmp_path / "dir" / f"whole-{part:05}-of-00011.gguf").write_bytes(b"x")
    (tmp_path / "dir" / "notes").mkdir()
    for name, base in (("tales", "owner/two"), ("verse", str(two)), ("lost", "owner/other"), ("odd", "x" * 5000)):
        (tmp_path / "dir" / name).mkdir()
        (tmp_path / "dir" / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    found = listed([str(one)], tmp_path / "dir", ["gpt-4", "mini=two"])
    assert [m.name for m in found] == ["one", "three", "two", "whole"]
    assert found[0].names == ("one", "gpt-4") and found[2].names == ("two", "mini", "tales", "verse")
    assert found[1].weight_bytes() == 7


def test_a_folder_that_nobody_may_look_into_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lost+found is, where models have a disk of their own."""
    model(tmp_path / "one")
    (tmp_path / "lost+found").mkdir()
    stat, iterdir = os.stat, Path.iterdir

    def refused(path: Any, **more: Any) -> os.stat_result:
        if Path(path).parent.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", refused)
    assert [m.name for m in listed([], tmp_path)] == ["one"]

    def shut(path: Path) -> Iterator[Path]:
        if path == tmp_path:
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", shut)
    with pytest.raises(UsageError, match=r"--models-dir .*: cannot be read \(Permission denied\)"):
        listed([], tmp_path)


@pytest.mark.parametrize(
    ("models", "aliases", "says"),
    [
        ([], [], "at least one model"),
        (["one", "other/one"], [], "another model is called one"),
        (["one"], ["x=two"], "--alias x=two"),
        (["one"], ["one"], "--alias one"),
        (["one"], ["=one"], "--alias"),
        (["missing"], [], "missing"),
    ],
)
def test_lists_that_cannot_be(tmp_path: Path, models: list[str], aliases: list[str], says: str) -> None:
    model(tmp_path / "one")
    model(tmp_path / "other" / "one")
    with pytest.raises(UsageError, match=says):
        listed([str(tmp_path / m) for m in models], None, aliases)


@pytest.mark.parametrize("alias", ["x=two", "one", "one=one", "=one"])
def test_other_names_of_one_model_that_cannot_be(tiny_models: Any, alias: str) -> None:
    settings = ServerSettings(server_port=0, model_name="one", alias=[alias])
    with pytest.raises(UsageError, match=f"^--alias {alias}: "):
        serve(str(tiny_models("llama")), settings, progress=lambda line: None, ready=lambda url, engine: None)


@pytest.mark.parametrize(
    "given",
    [
        {"node_url": "http://here:1"},
        {"proxy_url": "http://there:1"},
        {"enable_sleep_mode": True},
        {"adapter_dir": Path(__file__).parent},
        {"trusted_proxy": ["10.0.0.5"]},
    ],
)
def test_options_for_one_model_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^--{next(iter(given)).replace('_', '-')}: only for a server of one model$"):
        ServerSettings(**given).check(several=True)


def test_options_of_answers_are_told_to_each_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "media_io_kwargs": '{"video": {"num_frames": 4}}',
        "limit_mm_per_prompt": '{"image": 2}',
        "allowed_media_domains": ["a.example"],
        "allow_private_media": True,
        "grace_period": 120.0,
    }
    orders: list[Any] = []

    def launch(order: Any, kind: Any, child: Any) -> tuple[Any, dict[str, Any]]:
        orders.append(order)
        return SimpleNamespace(), {"memory": 1}

    monkeypatch.setattr("toolkit.serve.fleet.child.launch", launch)
    monkeypatch.setattr(Spare, "fill_later", lambda self: None)
    Launcher(TurbomindEngineConfig(), "key", ServerSettings(**given))(Listed("a", str(tmp_path)))
    assert given.items() <= vars(orders[0].settings).items()


def test_models_that_fit_the_budget_get_shares_that_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_models: Any
) -> None:
    """Of memory as a whole: activations and logits are no less than the KV cache."""
    orders: list[Any] = []

    def launch(order: Any, kind: Any, child: Any) -> tuple[Any, dict[str, Any]]:
        orders.append(order)
        return SimpleNamespace(), {"memory": 1}

    monkeypatch.setattr("toolkit.serve.fleet.child.launch", launch)
    monkeypatch.setattr(Spare, "fill_later", lambda self: None)
    both, budget = [Listed(name, str(tiny_models(name))) for name in ("llama", "qwen2")], 64 << 20
    weights = sum(model.weight_bytes() for model in both)
    config = TurbomindEngineConfig(device="cpu")
    launcher = Launcher(config, "key", ServerSettings(), budget=budget, weights=weights, models=2)
    total = 0
    for model in both:
        launcher(model)
        with AsyncEngine.open(model.path, backend_config=TurbomindEngineConfig(**orders[-1].config)) as engine:
            total += engine.plan.total
    assert budget / 4 < total <= budget


def test_sizes() -> None:
    assert [read_size("--memory", t) for t in ("12GB", "900mb", "2GiB", "5", "1.5k", "1.5 GB")] == [
        12 * 10**9, 900 * 10**6, 2 << 30, 5, 1500, 1_500_000_000,
    ]  # fmt: skip
    for text in ("", "GB", "-1GB", "12XB", "nan", "90 parsecs"):
        with pytest.raises(UsageError, match="--memory"):
            read_size("--memory", text)


# -- the command ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [*COMMAND, "serve", "api_server", *arguments, "--server-port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/", env=env)
    try:
        assert process.stderr is not None
        seen = ""
        for line in process.stderr:
            seen += line
            if found := re.search(r"http://[0-9.]+:\d+", line):
                break
        else:
            raise AssertionError(f"the server ended: {seen}")
        yield found[0], process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_two_models_on_one_port(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """A real server: two tiny models that do not fit together, loaded by name, put to sleep and woken."""
    for i, name in enumerate(("first", "second")):
        tiny_checkpoint("llama", tmp_path / name, seed=i)
    flags = ["--models-dir", str(tmp_path), "--memory", "3MB", "--alias", "gpt=second", "--session-len", "128"]
    flags += ["--max-batch-size", "2", "--api-keys", "secret", "--backend", "pytorch", "--device", "cpu"]
    flags += ["--max-concurrent-requests", "1"]
    with serving(str(tmp_path / "first"), *flags) as (url, process):
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=100) as client:
            assert httpx.get(f"{url}/v1/models").status_code == 401

            def states() -> dict[str, str]:
                return {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}

            told = client.post("/api/show", json={"model": "second:latest"}).json()
            assert told["model_info"]["llama.context_length"] == 128 and told["capabilities"]
            assert client.post("/api/show", json={"model": "third"}).json()["error"].startswith("model: 'third'")
            assert states() == {"first": "unloaded", "second": "unloaded", "gpt": "unloaded"}

            def ask(name: str) -> str:
                body = {"model": name, "prompt": "Hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
                reply = client.post("/v1/completions", json=body)
                assert reply.status_code == 200 and reply.json()["model"] == name, reply.text
                return reply.json()["choices"][0]["text"]

            first, second = ask("first"), ask("gpt")
            assert first != second and states() == {"first": "sleeping", "second": "loaded", "gpt": "loaded"}
            assert ask("first") == first and states()["second"] == "sleeping"
            assert ask("second") == second
            assert client.post("/v1/completions", json={"model": "third", "prompt": "a"}).status_code == 404
            assert client.post("/api/show", json={"model": "second:latest"}).json() == told  # whether loaded or not
            names = {path: [m["name"] for m in client.get(path).json()["models"]] for path in ("/api/tags", "/api/ps")}
            assert names == {"/api/tags": ["first", "second", "gpt"], "/api/ps": ["second", "gpt"]}
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200  # the first is meant
            assert client.post("/terminate", json={}).status_code == 404
            scraped = client.get("/metrics").text
            assert 'toolkit_models:model_up{model="second"} 1.0' in scraped and "node" not in scraped
            assert 'toolkit_models:requests_total{model="second",status="200"}' in scraped
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) >= 4
        process.terminate()
        process.communicate(timeout=60)
        _, alive = psutil.wait_procs(children, 60)
        assert process.returncode == 0 and not alive


@pytest.mark.parametrize(
    ("family", "spelled"),
    [("llama", "max_position_embeddings"), ("chatglm", "seq_length"), ("dbrx", "max_seq_len")],
)
def test_a_model_that_is_not_loaded_is_described_as_its_family_spells_it(
    family: str, spelled: str, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    path = tiny_checkpoint(family, tmp_path / family)
    config = json.loads((path / "config.json").read_text())
    config.pop("max_position_embeddings", None)
    config[spelled] = length = 448
    (path / "config.json").write_text(json.dumps(config))
    kind = config["model_type"]
    info = shown("x", path, None, ServerSettings(), None)["model_info"]
    layers = next(config[name] for name in ("num_hidden_layers", "num_layers", "n_layers") if name in config)
    hidden = next(config[name] for name in ("hidden_size", "d_model") if name in config)
    assert info == {
        "general.architecture": kind,
        f"{kind}.context_length": length,
        f"{kind}.embedding_length": hidden,
        f"{kind}.block_count": layers,
    }
    assert shown("x", path, None, ServerSettings(), 64)["model_info"][f"{kind}.context_length"] == 64


def test_one_process_waits_for_the_next_model() -> None:
    spare = Spare()
    assert spare.take() is None
    spare.fill()
    spare.fill()  # there is one already
    child = spare.take()
    assert child is not None and child.alive() and spare.take() is None
    child.close()
    before = psutil.Process().children()
    spare.fill()
    (waiting,) = [p for p in psutil.Process().children() if p not in before]
    waiting.kill()
    psutil.wait_procs([waiting], 60)
    assert spare.take() is None  # it has ended, so nobody gets it
    spare.close()
    spare.fill()
    assert spare.take() is None
