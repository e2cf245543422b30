"""Ranks on several machines: who comes is asked for the key and for what must be alike, and who does not come is named.

Machines are threads at the loopback address here, and in one slow test network namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.load.ranks import check, leads, nodes_of
from toolkit.engine.process import frontend
from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel import door as module
from toolkit.parallel import nodes
from toolkit.parallel.door import Door
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.nodes import KEY, Nodes, about
from toolkit.parallel.runner import RankedRunner
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.serve import run
from toolkit.serve.options import ServerSettings

PROMPT = np.random.default_rng(3).integers(3, 300, 30).tolist()
LAYOUT = Layout(tp=2)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "between us")


def model(path: Path, **fields: Any) -> Model:
    given: dict[str, Any] = {"dtype": "float32", "block_size": 16, "device": "cpu", "threads": 2} | fields
    return Model(str(path), RunnerOptions(**given), {})


@pytest.fixture
def second(support: Any, port: int) -> Any:
    """``second(model)``: the second machine."""
    return lambda model, **more: support("second_machine").Second(model, port, **more)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_two_machines_give_what_one_process_gives(
    host: str, port: int, second: Any, tiny_models: Any, support: Any
) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    path, steps = tiny_models("llama"), support("steps")
    other = second(model(path), host=host)
    ranks = RankedRunner(model(path), LAYOUT, Nodes(2, 0, host, port))
    try:
        one = open_runner(path, backend="pytorch", options=model(path).options)[0]
        assert ranks.pids == []
        assert steps.Driver(ranks).generate(PROMPT, 8) == steps.Driver(one).generate(PROMPT, 8)
    finally:
        ranks.close()
    assert other.end() == "" and other.told[-1].endswith("has ended")


def test_a_first_machine_that_is_gone_is_looked_for(
    port: int, second: Any, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_models("llama")
    other = second(model(path))
    ranks = RankedRunner(model(path), LAYOUT, Nodes(2, 0, "127.0.0.1", port))
    monkeypatch.setattr(nodes, "COME_SECONDS", 0.5)
    ranks._ranks.end()  # without a word, as when it is killed
    assert f"nobody is at 127.0.0.1:{port}" in other.end()
    ranks.close()


@pytest.fixture
def door(port: int) -> Iterator[Door]:
    with closing(Door(Nodes(2, 0, "127.0.0.1", port))) as made:
        yield made


def test_another_key_is_turned_away_and_who_is_missing_is_named(
    door: Door, second: Any, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = model(tiny_models("llama"))
    monkeypatch.setattr(nodes, "COME_SECONDS", 3.0)
    monkeypatch.setenv(KEY, "another")
    other = second(told)
    with pytest.raises(ToolkitError, match=r"rank 1 \(node_rank 1\): not come to 127\.0\.0\.1:\d+ within 3 s"):
        door.collect(2, about(Path(told.path), told, LAYOUT))
    assert other.end().startswith(f"{KEY}: ")


@pytest.mark.parametrize(("other", "what"), [
    ({"family": "qwen2"}, "another model"),
    ({"quant_policy": 8}, r"other options \(quant_policy: 8, here 0\)"),
    ({}, "another version"),
])  # fmt: skip
def test_machines_that_are_not_alike(
    other: dict[str, Any], what: str, door: Door, second: Any, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = model(tiny_models("llama"))
    own = about(Path(mine.path), mine, LAYOUT)
    if not other:
        own["version"] = "0.0"
    machine = second(model(tiny_models(other.pop("family", "llama")), **other))
    with pytest.raises(ToolkitError, match=rf"rank 1 at 127\.0\.0\.1: it has {what}"):
        door.collect(2, own)
    assert re.search(what, machine.end())


def test_a_stranger_is_no_hindrance(door: Door, port: int, tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GREET_SECONDS", 1.0)
    monkeypatch.setattr(nodes, "COME_SECONDS", 3.0)
    told = model(tiny_models("llama"))
    with socket.create_connection(("127.0.0.1", port)) as one, socket.create_connection(("127.0.0.1", port)) as two:
        one.sendall(b"GET / HTTP/1.1\r\n\r\n")
        two.sendall(b"\x00\x00\x00\x05hello")
        with pytest.raises(ToolkitError, match="not come to"):
            door.collect(2, about(Path(told.path), told, LAYOUT))


def test_however_many_say_nothing_others_are_heard(
    door: Door, port: int, second: Any, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "COME_SECONDS", 60.0)
    monkeypatch.setattr(module, "GREET_SECONDS", 50.0)
    told = model(tiny_models("llama"))
    with ExitStack() as silent:
        for _ in range(5):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        other = second(told)
        with pytest.raises(ToolkitError, match=r"rank 1 at 127\.0\.0\.1: it has another version"):
            door.collect(2, about(Path(told.path), told, LAYOUT) | {"version": "0.0"})
    assert "another version" in other.end()


def test_one_whose_bytes_come_one_by_one_is_turned_away(
    door: Door, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "GREET_SECONDS", 1.0)
    monkeypatch.setattr(nodes, "COME_SECONDS", 1.5)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"\x00\x00\x00\x14")

        def drip() -> None:
            with suppress(OSError):  # it is hung up
                for _ in range(20):
                    slow.sendall(b"x")
                    time.sleep(0.5)

        thread, begun = threading.Thread(target=drip), time.monotonic()
        thread.start()
        with pytest.raises(ToolkitError, match="not come to"):
            door.collect(2, {})
        assert time.monotonic() - begun < 6 and "somebody at 127.0.0.1 was turned away" in caplog.text
        thread.join()


def test_one_that_will_not_come_is_not_waited_for(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever has started it tells; here at the second question."""
    monkeypatch.setattr(module, "ASK_SECONDS", 0.05)
    told = iter(["", "rank 1: no memory"])
    with pytest.raises(ToolkitError, match=r"^rank 1: no memory$"):
        door.collect(2, {}, lambda: next(told))


def test_a_port_that_is_taken(door: Door, port: int) -> None:
    with pytest.raises(UsageError, match=rf"dist_init_addr: 127\.0\.0\.1:{port}: Address already in use; expected a"):
        Door(Nodes(2, 0, "127.0.0.1", port))


def test_an_address_of_another_machine() -> None:
    """192.0.2.1 is no machine's (RFC 5737). That no port is free there is not what is wrong."""
    with pytest.raises(UsageError, match=r"dist_init_addr: 192\.0\.2\.1:7: .*; expected an address of this machine"):
        Door(Nodes(2, 0, "192.0.2.1", 7))


@pytest.mark.parametrize(("given", "message"), [
    ({"node_rank": 2}, "node_rank: found 2, expected 0 to 1"),
    ({}, "dist_init_addr: found nothing, expected HOST:PORT"),
    ({"dist_init_addr": "a:99999"}, "expected HOST:PORT"),
    ({"dist_init_addr": "a"}, "expected HOST:PORT"),
    ({"dist_init_addr": "a:²"}, "dist_init_addr: found a:², expected HOST:PORT"),
    ({"master_addr": "a"}, "expected HOST:PORT"),
    ({"master_addr": "a", "dist_init_addr": "a:1"}, "give one of them"),
    ({"master_addr": "a", "master_port": 0}, "master_port"),
    ({"tp": 1}, "nnodes=2: expected tp, pp or dp above 1"),
    ({"dist_init_addr": "a:1", "distributed_executor_backend": "uni"}, "uni is one process, found tp=2; expected mp"),
    ({"dist_init_addr": "a:1", "distributed_executor_backend": "ray"}, "ray places ranks by itself"),
    ({"dist_init_addr": "a:1", "tp": 3}, r"nnodes=2: 3 ranks .*; expected a multiple of 2"),
    ({"dist_init_addr": "a:1", "distributed_executor_backend": "mpi"}, "expected one of uni, mp, ray, found 'mpi'"),
])  # fmt: skip
def test_options_that_do_not_go_together(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match=message):
        check(PytorchEngineConfig(**{"tp": 2, "nnodes": 2} | given))


def test_a_key_that_is_missing_is_told_before_a_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY)
    with pytest.raises(UsageError, match=f"^{KEY}: not set"):
        check(PytorchEngineConfig(tp=2, nnodes=2, dist_init_addr="a:1"))


def test_where_the_first_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Nodes.of(1, 0, None, LAYOUT) is None
    named = PytorchEngineConfig(tp=2, nnodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500)
    assert nodes_of(named, LAYOUT) == Nodes(2, 1, "10.0.0.1", 29500) and not leads(named)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert Nodes.of(2, 1, None, LAYOUT) == Nodes(2, 1, "10.0.0.1", 29500)
    with pytest.raises(UsageError, match=r"nnodes=2: 3 ranks .*; expected a multiple of 2"):
        Nodes(2, 0, "a", 1).ranks(3)
    monkeypatch.setenv(KEY, "")
    with pytest.raises(UsageError, match=KEY):
        Door(Nodes(2, 0, "127.0.0.1", 1))


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "7"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    found = Nodes.of(1, 0, None, LAYOUT)
    assert found == Nodes(2, 1, "::1", 7, launched=2) and found.here(2) == 2 and list(found.ranks(2)) == [1]
    assert leads(PytorchEngineConfig())  # of one rank: whoever started it wants as many engines
    with pytest.raises(UsageError, match=r"tp=2 \(WORLD_SIZE=2\): turbomind .* starts its ranks by itself"):
        check(TurbomindEngineConfig(tp=2))
    with pytest.raises(UsageError, match=r"WORLD_SIZE=2 \(torchrun\): tp=3 has 3 ranks; start as many"):
        check(PytorchEngineConfig(tp=3))
    monkeypatch.setenv("MASTER_PORT", "²")
    with pytest.raises(UsageError, match="MASTER_PORT=²; expected all that torchrun sets"):
        check(PytorchEngineConfig(tp=2))
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(UsageError, match="RANK=1, MASTER_ADDR=::1, MASTER_PORT=None; expected all that torchrun sets"):
        check(PytorchEngineConfig(tp=2))


def test_a_server_of_another_machine_listens_nowhere(
    port: int, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[Any] = []
    monkeypatch.setattr(frontend, "lend", lambda setup, progress: lent.append(setup))
    monkeypatch.setattr(run, "bind", lambda host, port: pytest.fail("it is bound"))
    config = PytorchEngineConfig(tp=2, nnodes=2, node_rank=1, dist_init_addr=f"127.0.0.1:{port}")
    with pytest.raises(SystemExit) as ended:
        run.serve(str(tiny_models("llama")), ServerSettings(), engine_config=config, progress=str, ready=pytest.fail)
    assert ended.value.code == 0 and len(lent) == 1


@pytest.mark.slow
def test_torchrun_starts_ranks(tiny_models: Any) -> None:
    """The real one, as a user types it; both of its processes end well when the first has answered."""
    ask = ["-m", "toolkit", "chat", str(tiny_models("llama")), "--dtype", "float32", "--device", "cpu"]
    ask += ["--session-len", "64", "--prompt", "Name three colours.", "--max-new-tokens", "8", "--temperature", "0"]
    python = [sys.executable]
    launcher = [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone, several = (
        subprocess.run([*command, *ask, *more], capture_output=True, text=True, timeout=300)
        for command, more in ((python, ["--backend", "pytorch"]), (launcher, ["--tp", "2"]))
    )
    assert alone.returncode == several.returncode == 0, alone.stderr + several.stderr
    assert several.stdout == alone.stdout


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces, 10.97.5.1 and 10.97.5.2, joined by a cable."""
    names = [f"ranks-{os.getpid()}-{i}" for i in (1, 2)]
    ends = [f"rk{os.getpid() % 100000}{side}" for side in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip and root")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.97.5.{i}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as e:
        pytest.skip(f"no network namespaces here: {e.stderr.decode().strip()}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pytorch", "turbomind"])
def test_two_network_namespaces(backend: str, machines: list[str], tiny_models: Any, tmp_path: Path) -> None:
    """The command as a user types it, on both; the model lies elsewhere on the second."""
    path = tiny_models("llama")
    copy = shutil.copytree(path, tmp_path / "elsewhere")
    ask = ["--backend", backend, "--dtype", "float32", "--device", "cpu", "--threads", "1", "--session-len", "64"]
    ask += ["--prompt", "Name three colours.", "--max-new-tokens", "8", "--temperature", "0"]
    tool = [sys.executable, "-m", "toolkit", "chat"]
    alone = subprocess.run([*tool, str(path), *ask], capture_output=True, text=True, timeout=200)
    assert alone.returncode == 0, alone.stderr
    env = os.environ | {KEY: "between us"}
    several = [*ask, "--tp", "2", "--nnodes", "2", "--dist-init-addr", "10.97.5.1:29511"]
    first, second = (
        subprocess.Popen(
            ["ip", "netns", "exec", name, *tool, str(where), *several, "--node-rank", str(i)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for i, (name, where) in enumerate(zip(machines, (path, copy), strict=True))
    )  # fmt: skip
    try:
        out, err = first.communicate(timeout=200)
        assert first.returncode == 0, err
        assert out == alone.stdout
    finally:
        for process in (first, second):
            process.terminate()
            process.communicate(timeout=30)
