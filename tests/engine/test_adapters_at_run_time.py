"""Adapters that come and go while requests run: none of those fails, and each is answered as if it ran alone."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.artifacts.adapters.adapter import read_changes
from toolkit.artifacts.manifest import content_digest
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.configs.generation import GenerationConfig
from toolkit.engine.adapters import Adapters
from toolkit.engine.process.adapter_names import AdapterNames
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.native import library
from toolkit.serve import run
from toolkit.serve.adapter_routes import Watch, unload
from toolkit.serve.adapter_routes import load as load_adapter
from toolkit.serve.http.errors import ApiError
from toolkit.serve.options import ServerSettings
from toolkit.serve.state import ServerState

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library does not run here")
STREAMS = 32
SHORT = GenerationConfig(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tiny_models: Any, support: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, write = tmp_path_factory.mktemp("adapters"), support("adapters").write_adapter
    model = tiny_models("llama")
    return {name: write(root / name, model, "[qv]_proj|down_proj", rank=r, seed=r) for name, r in (("a", 4), ("b", 9))}


@pytest.fixture
def engine(tiny_models: Any) -> Iterator[AsyncEngine]:
    config = TurbomindEngineConfig(
        session_len=128, max_batch_size=8, dtype="float32", adapter_memory="30kB", cache_max_entry_count=64
    )
    with AsyncEngine.open(tiny_models("llama"), backend_config=config) as made:
        yield made


class State:
    """What the watch asks of a server's state."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.settings = SimpleNamespace(adapters=())
        self.loaded: dict[str, Path] = {}
        self.adapter_turn = threading.Lock()
        self.unloaded: set[str] = set()

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.loaded)

    model_names = adapters


def answer(engine: AsyncEngine, i: int, name: str | None) -> list[int]:
    deltas = list(engine.generate_sync([5 + i % 4, 6, 7], SHORT, adapter=name))
    assert deltas[-1].finish_reason == "length", deltas[-1].error_message
    return [t for d in deltas for t in d.token_ids]


def test_loading_and_unloading_under_many_streams(engine: AsyncEngine, adapters: dict[str, Path]) -> None:
    engine.adapters.load("a", adapters["a"])
    names = [None, "a"]
    expected = {(i, name): answer(engine, i, name) for i in range(4) for name in names}
    assert expected[0, None] != expected[0, "a"]
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(answer, engine, i, names[i % 2]) for i in range(2 * STREAMS)]
        for _ in range(4):
            engine.adapters.load("b", adapters["b"])
            engine.adapters.unload("b")
        engine.adapters.load("b", adapters["b"])
        assert [f.result() for f in running] == [expected[i % 4, names[i % 2]] for i in range(2 * STREAMS)]
        last = [pool.submit(answer, engine, i, "b") for i in range(4)]
        assert all(f.result() for f in last)
    with pytest.raises(UsageError, match="'a' is taken"):
        engine.adapters.load("a", adapters["b"])
    engine.adapters.unload("a")
    assert engine.adapters.names == ("b",)
    refused = list(engine.generate_sync([5], SHORT, adapter="a"))[-1]
    assert refused.finish_reason == "error" and "expected one of b, found 'a'" in str(refused.error_message)
    with pytest.raises(UsageError, match="there is no adapter 'a'; there is b"):
        engine.adapters.unload("a")


def test_one_that_only_a_held_request_uses_leaves_with_it(
    engine: AsyncEngine, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        engine.adapters.load(name, adapters[name])
    assert answer(engine, 0, "b")  # memory has room for one of them
    let = threading.Event()
    monkeypatch.setattr(
        "toolkit.artifacts.adapters.adapter.read_changes", lambda *of: let.wait(60) and read_changes(*of)
    )
    runner = engine._loop._core.runner  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(lambda: list(engine.generate_sync([5], SHORT, request_id="held", adapter="a")))
        while not engine.stats()["waiting"]:
            time.sleep(0.001)
        engine.adapters.unload("a")
        there = set(runner.adapter_numbers)
        engine.abort("held")
        ended = held.result(60)[-1].finish_reason
        let.set()
        assert (there, ended, set(runner.adapter_numbers)) == ({0, 1}, "abort", {1})


@pytest.mark.parametrize("kept", [False, True])
def test_streams_go_on_while_one_is_read(
    kept: bool, tiny_models: Any, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its files nor their digest are read between two steps."""
    names = ["files", "digest"] if kept else ["files"]
    begun, let = ({name: threading.Event() for name in names} for _ in range(2))

    def slowly(name: str, read: Any) -> Any:
        def found(*arguments: Any) -> Any:
            begun[name].set()
            assert let[name].wait(60), "no step ran meanwhile"
            return read(*arguments)

        return found

    monkeypatch.setattr("toolkit.engine.adapters.content_digest", slowly("digest", content_digest))
    monkeypatch.setattr("toolkit.artifacts.adapters.adapter.read_changes", slowly("files", read_changes))
    config = TurbomindEngineConfig(
        session_len=8192, dtype="float32", cache_max_entry_count=256, kv_cache_dir=str(tmp_path) if kept else None
    )
    with AsyncEngine.open(tiny_models("llama"), backend_config=config) as engine, ThreadPoolExecutor(1) as pool:
        stream = engine.generate_sync([5, 6, 7], GenerationConfig(max_new_tokens=8000, ignore_eos=True))
        next(stream)
        loading = pool.submit(engine.adapters.load, "a", adapters["a"])
        for name in names:
            assert begun[name].wait(60)
            steps, until = engine.stats()["steps"], time.monotonic() + 30
            while engine.stats()["steps"] < steps + 10 and time.monotonic() < until:
                time.sleep(0.001)
            assert engine.stats()["steps"] >= steps + 10 and not loading.done()
            let[name].set()
        loading.result(60)
        stream.close()
        assert answer(engine, 0, "a")


def test_a_bad_one_changes_nothing(engine: AsyncEngine, adapters: dict[str, Path], tmp_path: Path) -> None:
    before = answer(engine, 0, None)
    with pytest.raises(ToolkitError, match=r"found no adapter_config\.json"):
        engine.adapters.load("bad", tmp_path)
    assert engine.adapters.names == () and answer(engine, 0, None) == before


def test_a_folder_whose_name_is_no_text_holds_up_no_other(
    tiny_models: Any, adapters: dict[str, Path], tmp_path: Path
) -> None:
    config = TurbomindEngineConfig(session_len=128, dtype="float32", cache_max_entry_count=64)
    with AsyncEngine.open(tiny_models("llama"), backend_config=config, process=True) as engine:
        with pytest.raises(UsageError, match="cannot be told to the engine"):
            engine.adapters.load("bad", tmp_path / os.fsdecode(b"\xff"))
        engine.adapters.load("a", adapters["a"])
        assert answer(engine, 0, "a")


def test_files_that_change_below_it_change_no_answer(
    engine: AsyncEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """One that memory does not hold is read again; what the cache has is of what it was."""

    def told(name: str) -> Any:
        deltas = list(engine.generate_sync([5 + i % 40 for i in range(100)], SHORT, adapter=name))
        return deltas[-1].error_message or [t for d in deltas for t in d.token_ids]

    own = shutil.copytree(adapters["a"], tmp_path / "a")
    for name, path in (("a", own), ("b", adapters["b"])):
        engine.adapters.load(name, path)
    a, b = told("a"), told("b")  # for which a has to go
    shutil.rmtree(own)
    shutil.copytree(adapters["b"], own)
    assert "unload it and load it once more" in told("a") and told("b") == b
    shutil.rmtree(own)
    shutil.copytree(adapters["a"], own)  # the same, though not of the same time
    assert told("a") == a
    engine.adapters.unload("a")
    shutil.rmtree(own)
    shutil.copytree(adapters["b"], own)
    engine.adapters.load("a", own)
    assert told("a") == b


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_what_tells_an_adapter_from_others_is_of_its_weights_too(name: str, tmp_path: Path) -> None:
    """Else two with the same configuration would have each other's blocks."""
    (tmp_path / "adapter_config.json").write_text("{}")
    digests = set()
    for data in (b"one", b"other"):
        (tmp_path / name).write_bytes(data)
        digests.add(content_digest(tmp_path))
    assert len(digests) == 2


def test_one_that_cannot_be_told_from_others_does_not_stay_with_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    runner: Any = SimpleNamespace(add_adapter=lambda number, path: taken.append(number), remove_adapter=taken.remove)

    def fails(path: Path) -> str:
        raise ToolkitError("cannot be read")

    monkeypatch.setattr("toolkit.engine.adapters.content_digest", fails)
    with pytest.raises(ToolkitError, match="cannot be read"):
        Adapters(runner, ()).load(0, tmp_path, digest=True)
    assert not taken


def test_files_that_change_while_the_engine_sleeps_are_another_adapter(
    tiny_models: Any, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Blocks that are kept on disk are of what was there before."""
    own = shutil.copytree(adapters["a"], tmp_path / "a")
    config = TurbomindEngineConfig(
        session_len=128, dtype="float32", adapters={"own": str(own)}, kv_cache_dir=str(tmp_path / "kv"),
        cache_block_seq_len=16, cache_max_entry_count=64,
    )  # fmt: skip
    with AsyncEngine.open(tiny_models("llama"), backend_config=config) as engine:

        def told(name: str) -> tuple[list[int], int]:
            deltas = list(engine.generate_sync([5 + i % 40 for i in range(100)], SHORT, adapter=name))
            return [t for d in deltas for t in d.token_ids], deltas[-1].cached_tokens

        engine.adapters.load("b", adapters["b"])
        before, b = told("own"), told("b")
        assert before[0] != b[0]
        for now, expected, cached in (("a", before, 96), ("b", b, 96)):
            engine.weights.sleep()
            shutil.rmtree(own)
            shutil.copytree(adapters[now], own)
            engine.weights.wake(["weights", "kv_cache"])
            assert told("own") == (expected[0], cached)


@pytest.mark.parametrize("kept", [False, True])
def test_one_that_has_gone_is_not_read_by_an_engine_that_starts_again(
    kept: bool, tiny_models: Any, adapters: dict[str, Path], tmp_path: Path, kill_process: Any
) -> None:
    """Its files may be gone; the numbers of the others stay."""
    own = shutil.copytree(adapters["a"], tmp_path / "a")
    config = TurbomindEngineConfig(
        session_len=128, dtype="float32", cache_max_entry_count=64, adapters={"own": str(own), "b": str(adapters["b"])},
        kv_cache_dir=str(tmp_path / "kv") if kept else None,
    )  # fmt: skip
    with AsyncEngine.open(tiny_models("llama"), backend_config=config, process=True) as engine:
        b = answer(engine, 0, "b")
        engine.adapters.unload("own")
        shutil.rmtree(own)
        kill_process(engine)
        assert engine.adapters.names == ("b",) and answer(engine, 0, "b") == b


def test_a_watched_folder(engine: AsyncEngine, adapters: dict[str, Path], tmp_path: Path) -> None:
    state = State(engine)
    watch = Watch(cast(ServerState, state), tmp_path)
    watch.look()
    assert engine.adapters.names == ()
    shutil.copytree(adapters["a"], tmp_path / "tales")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text("{}")
    watch.look()
    watch.look()
    assert engine.adapters.names == ("tales",) and answer(engine, 0, "tales")
    for _ in range(2):  # one that comes back as it was, too
        aside = (tmp_path / "tales").rename(tmp_path / ".tales")
        watch.look()
        assert engine.adapters.names == ()
        aside.rename(tmp_path / "tales")
        watch.look()
        assert engine.adapters.names == ("tales",)
    shutil.rmtree(tmp_path / "tales")
    watch.look()
    assert engine.adapters.names == ()


def test_one_that_cannot_go_while_the_engine_is_down_is_still_there() -> None:
    """Else its name could neither be used, nor unloaded, nor loaded again."""
    down = ["the engine failed"]

    def call(*asked: Any) -> None:
        if down:
            raise ToolkitError(down[0])

    names = AdapterNames(call, ["a"], "model")
    with pytest.raises(ToolkitError, match="the engine failed"):
        names.unload("a")
    assert names.names == ("a",) and names.number("a") == 0
    down.clear()
    names.unload("a")
    assert names.names == ()


def test_one_that_is_unloaded_as_soon_as_it_is_there_is_gone(tmp_path: Path) -> None:
    """Else the server would have a name that the engine has not, and that could neither be loaded nor unloaded."""
    names, threads = AdapterNames(lambda *asked: True, [], "model"), []

    def load(name: str, path: Path) -> None:
        names.load(name, path)
        threads.append(thread := threading.Thread(target=unload, args=(state, name)))
        thread.start()
        thread.join(0.1)

    engine = SimpleNamespace(adapters=SimpleNamespace(load=load, unload=names.unload))
    state = cast(ServerState, State(cast(AsyncEngine, engine)))
    load_adapter(state, "a", tmp_path)
    threads[0].join()
    assert state.adapters == names.names == ()


def test_a_request_whose_adapter_goes_while_it_waits_is_not_the_model_s_own() -> None:
    state = ServerState.__new__(ServerState)
    state.engine = cast(AsyncEngine, SimpleNamespace(model_name="model"))
    state.settings = ServerSettings(alias=["other=model"], adapters=("b",))
    state.loaded, state.unloaded = {"a": Path("a")}, set()
    assert [state.adapter_of(name) for name in ("a", "b", "model", "other")] == ["a", "b", None, None]
    del state.loaded["a"]
    state.unloaded.add("b")
    for name in ("a", "b"):
        with pytest.raises(ApiError, match=f"'{name}' is not served here; this server has 'model', 'other'"):
            state.adapter_of(name)


def test_a_watched_folder_is_looked_at_again_when_the_engine_is_back(tmp_path: Path) -> None:
    def change(*asked: Any) -> None:
        assert engine.healthy

    engine = SimpleNamespace(healthy=False, adapters=SimpleNamespace(load=change, unload=change))
    state = State(cast(AsyncEngine, engine))
    watch = Watch(cast(ServerState, state), tmp_path)
    (tmp_path / "tales").mkdir()
    (tmp_path / "tales" / "adapter_config.json").write_text("{}")
    for there in ((), ("tales",)):
        watch.look()
        assert state.adapters == there
        engine.healthy = True
    shutil.rmtree(tmp_path / "tales")
    engine.healthy = False
    for there in (("tales",), ()):
        watch.look()
        assert state.adapters == there
        engine.healthy = True


def test_a_watched_folder_that_cannot_be_read_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SimpleNamespace(healthy=True, adapters=SimpleNamespace(load=lambda *asked: None))
    state = State(cast(AsyncEngine, engine))
    watch = Watch(cast(ServerState, state), tmp_path)
    (tmp_path / "tales").mkdir()
    (tmp_path / "tales" / "adapter_config.json").write_text("{}")
    watch.look()

    def stale(folder: Path, pattern: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", stale)
        watch.look()
        watch.look()
    assert state.adapters == ("tales",) and caplog.text.count("cannot be read now (Stale file handle)") == 1
    shutil.copytree(tmp_path / "tales", tmp_path / "verse")
    watch.look()
    assert state.adapters == ("tales", "verse")


@pytest.mark.parametrize("dies", [False, True])
def test_one_of_a_watched_folder_that_could_not_be_loaded_is_tried_again(dies: bool, tmp_path: Path) -> None:
    """When files come, be they older than those that are there; or when the engine is back that died over it."""
    tries: list[str] = []

    def first_fails(name: str, path: Path) -> None:
        tries.append(name)
        if len(tries) == 1:
            engine.healthy = not dies
            raise ToolkitError("no weights")

    engine = SimpleNamespace(healthy=True, adapters=SimpleNamespace(load=first_fails))
    state = State(cast(AsyncEngine, engine))
    watch = Watch(cast(ServerState, state), tmp_path)
    (tmp_path / "tales").mkdir()
    (tmp_path / "tales" / "adapter_config.json").write_text("{}")
    watch.look()
    watch.look()
    assert tries == ["tales"] and state.adapters == ()
    engine.healthy = True
    if not dies:
        (weights := tmp_path / "tales" / "adapter_model.safetensors").touch()
        os.utime(weights, (1, 1))
    watch.look()
    assert state.adapters == ("tales",)


def test_a_server_has_the_folder_s_adapters_when_it_is_ready(
    tiny_models: Any, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(adapters["a"], tmp_path / "tales")
    names: list[str] = []
    monkeypatch.setattr(run, "run_app", lambda app, *rest: names.extend(app.state.server.model_names))
    run.serve(
        str(tiny_models("llama")),
        ServerSettings(server_port=0, adapter_dir=tmp_path),
        engine_config=TurbomindEngineConfig(session_len=64, dtype="float32"),
        progress=lambda line: None,
        ready=lambda url, engine: None,
    )
    assert names[1:] == ["tales"]


def test_another_process_finds_no_blocks_of_another_adapter(
    tiny_models: Any, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Numbers of adapters begin anew in each process; what is kept on disk goes by what an adapter is."""
    prompt = [5 + i % 50 for i in range(100)]

    def answers(*names: str, **more: Any) -> tuple[list[int], int]:
        """Tokens by the last of ``names``, and how many of the prompt's were cached."""
        config = TurbomindEngineConfig(session_len=256, dtype="float32", cache_max_entry_count=64, **more)
        with AsyncEngine.open(tiny_models("llama"), backend_config=config) as engine:
            for name in names:
                engine.adapters.load(name, adapters[name])
            deltas = list(engine.generate_sync(prompt, SHORT, adapter=names[-1]))
        return [t for d in deltas for t in d.token_ids], max(d.cached_tokens for d in deltas)

    plain = {name: answers(name)[0] for name in ("a", "b")}
    assert plain["a"] != plain["b"]
    for name, cached in (("a", 0), ("b", 0), ("a", 64), ("b", 64)):
        assert answers(name, kv_cache_dir=str(tmp_path / "kept")) == (plain[name], cached)
    assert answers("a", "b", kv_cache_dir=str(tmp_path / "kept")) == (plain["b"], 64)
