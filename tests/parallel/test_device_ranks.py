"""Ranks on devices of their own, by a device that stands in (``support/acme_ranks.py``), and what GPUs are chosen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.load import ranks as ranks_of_engine
from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel import choose, devices, links, on_ray, watch
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.native_runner import NativeRanks
from toolkit.parallel.runner import RankedRunner
from toolkit.runners.base import RunnerOptions

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    shutil.copy(SUPPORT / "torch_stand_in.py", folder / "torch_acme.py")
    for name in ("acme_ranks.py", "steps.py"):
        shutil.copy(SUPPORT / name, folder)
    brought = folder / "acme_toolkit-1.0.dist-info"
    brought.mkdir()
    (brought / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-toolkit\nVersion: 1.0\n")
    (brought / "entry_points.txt").write_text("[toolkit.devices]\nacme = acme_ranks:DEVICE\n")
    return folder


@pytest.fixture
def ranks(packages: Path, tmp_path: Path) -> Any:
    """``ranks(path, layout, what, **environment)``: what ``acme_ranks.py`` prints, in a process of its own, for torch
    keeps a device that it was told of."""

    def begin(path: Path, layout: dict[str, int], what: str, **environment: str) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1", "ACME_DEVICES": "4"}
        command = [sys.executable, str(packages / "acme_ranks.py"), str(path), json.dumps(layout), what]
        env |= {"ACME_SEEN": str(tmp_path)} | environment
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    def run(*given: Any, code: int = 0, **environment: str) -> dict[str, Any]:
        with begin(*given, **environment) as process:
            try:
                told, errors = process.communicate(timeout=100)
            finally:
                process.kill()
        assert process.returncode == code, errors
        found: dict[str, Any] = json.loads(told.splitlines()[-1])
        return found

    run.begin = begin  # type: ignore[attr-defined]

    return run


@pytest.mark.parametrize(("family", "layout", "messages"), [
    ("llama", {"tp": 2}, lambda layers: [2 * layers + 1, 1, 0, 0]),  # as on CPUs: … the embedding; the logits
    ("llama", {"pp": 2}, lambda layers: [0, 0, 1, 0]),
    ("qwen2_moe", {"tp": 2, "ep": 2}, lambda layers: [2 * layers + 1, 1, 0, 4 * layers]),
])  # fmt: skip
def test_ranks_on_devices_give_what_one_process_gives(
    family: str, layout: dict[str, int], messages: Any, tiny_models: Any, ranks: Any, tmp_path: Path
) -> None:
    """No row of the hidden size comes to the host; each rank speaks on a device of its own, and the one with least room
    counts."""
    found = ranks(tiny_models(family), layout, "compare", ACME_USED="3,1")
    assert "refused" not in found, found
    assert found["tokens"][0] == found["tokens"][1]
    assert found["messages"] == messages(found["layers"])
    assert found["to_host"] or layout == {"pp": 2}  # its last stage draws the tokens
    assert not [shape for shape in found["to_host"] if found["hidden"] in shape]
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{pid}-{number}" for pid, number in zip(found["pids"], (3, 1), strict=True)
    }
    assert found["free"] == 1 << 30  # of acme:1; acme:3 has more
    assert found["device"] == "acme:3" and "2 ranks over acmeccl" in found["notes"][0]


def test_torchrun_s_ranks_take_the_devices_that_it_counts(tiny_models: Any, ranks: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    told |= {"TOOLKIT_RANKS_KEY": "between us", "ACME_USED": "3,1"}
    given = tiny_models("llama"), {"tp": 2}, "compare"
    with ranks.begin(*given, **told, RANK="1", LOCAL_RANK="1") as second:
        try:
            found = ranks(*given, **told, RANK="0", LOCAL_RANK="0")
            second.communicate(timeout=100)
        finally:
            second.kill()
    assert found["tokens"][0] == found["tokens"][1] and found["device"] == "acme:3" and second.returncode == 0
    assert sorted(file.name.partition("-")[2] for file in tmp_path.iterdir()) == ["1", "3"]


def test_fewer_devices_than_ranks_are_told_before_anything_is_opened(tmp_path: Path, ranks: Any) -> None:
    found = ranks(tmp_path / "none", {"tp": 3}, "compare", ACME_DEVICES="2")
    assert found["refused"] == (
        "tp=3: device acme: 3 ranks on this machine need one each, and there are 2; use fewer ranks, or device cpu"
    )


@pytest.mark.parametrize(("what", "told"), [("killed", "was killed by signal 9"), ("stands", "has not answered for")])
def test_a_rank_that_is_lost_in_a_message_is_no_hang(what: str, told: str, tiny_models: Any, ranks: Any) -> None:
    """A message on a device waits for ever; the connection that steps go over tells, or the clock."""
    begun = time.monotonic()
    found = ranks(tiny_models("llama"), {"tp": 2}, what, TOOLKIT_RANKS_TIMEOUT="120" if what == "killed" else "10")
    assert found["lost"].startswith("a rank of the model is lost: rank 1 (process ") and told in found["lost"]
    assert time.monotonic() - begun < 100


def test_a_rank_whose_first_one_is_gone_ends_in_the_midst_of_a_message(tiny_models: Any, ranks: Any) -> None:
    pid = ranks(tiny_models("llama"), {"tp": 2}, "alone", code=-signal.SIGKILL)["pid"]
    until = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


# -- the watch


class Broken:
    """Of a ``Group`` what is watched."""

    def __init__(self, since: float | None) -> None:
        self.since, self.why = since, ""
        self.aborted = threading.Event()

    def abort(self, why: str) -> None:
        self.why, self.since = why, None
        self.aborted.set()


def test_a_message_ends_when_a_connection_does_or_time_is_over() -> None:
    mine, theirs = socket.socketpair()
    with mine:
        group: Any = Broken(None)
        one = watch.Watch(group, [mine.fileno()], 0.0)
        assert not group.aborted.wait(0.5)  # between steps nothing is late
        theirs.send(b"something")
        assert not group.aborted.wait(0.3)
        theirs.close()
        assert group.aborted.wait(10) and group.why == "a rank has hung up"
        one.stop()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        late: Any = Broken(time.monotonic())
        one = watch.Watch(late, [mine.fileno()], 0.0)
        assert late.aborted.wait(10) and late.why == "no rank has gone on for 0 s"
        one.stop()


STUCK = """
import socket, threading, time
from types import SimpleNamespace
from toolkit.parallel import watch
watch.BACK_SECONDS = 0.5
mine, theirs = socket.socketpair()
watch.Watch(SimpleNamespace(since=0.0, abort=lambda why: time.sleep(60)), [mine.fileno()], 3600.0)
theirs.close()
time.sleep(60)
"""


def test_a_process_whose_device_does_not_let_go_ends() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "a rank has hung up, and the device does not end the message" in done.stderr


# -- which GPU


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``gpus(count)``: so many stand in; a model is never opened."""

    def there(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(devices, "gpu_is_likely", lambda: count > 0)

    return there


def test_each_rank_takes_a_gpu_of_its_own(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(4)
    assert devices.kind_of_ranks("auto") == devices.kind_of_ranks("cuda") == "cuda"
    assert links.link_of("cuda") is links.NCCL and links.NCCL.queued and not links.GLOO.queued
    of_two_machines = [devices.own_device("cuda", (), devices.place_of(rank, 2, False)) for rank in range(4)]
    assert of_two_machines == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert devices.own_device("cuda", (3, 2), devices.place_of(3, 2, False)) == "cuda:2"
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.own_device("cuda", (), devices.place_of(7, 4, True)) == "cuda:3"
    assert devices.place_of(1, 2, False) == (1, 2)  # not torchrun's


@pytest.mark.parametrize(("count", "numbers", "message"), [
    (1, (), r"^tp=2: device cuda: 2 ranks on this machine need one each, and there are 1 \(CUDA_VISIBLE_DEVICES='7'\)"),
    (2, (0,), r"devices: found \[0\], expected 2 different numbers"),
    (2, (1, 1), r"devices: found \[1, 1\], expected 2 different numbers"),
    (2, (0, 5), "devices: found 5, there are 2 of cuda, counted from 0"),
    (0, (), "device: 'cuda' asked for, but "),
])  # fmt: skip
def test_gpus_that_are_not_there(
    count: int, numbers: tuple[int, ...], message: str, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UsageError, match=message):
        RankedRunner(Model("none", RunnerOptions(device="cuda"), {}, devices=numbers), Layout(tp=2))


@pytest.mark.parametrize(("backend", "told"), [(None, ""), ("turbomind", "turbomind's ranks run on CPUs; pytorch")])
def test_pytorch_runs_ranks_on_gpus(
    backend: Any, told: str, gpus: Any, tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setattr(choose, "RankedRunner", lambda model, layout, nodes: model.options.device)
    model = Model(str(tiny_models("llama")), RunnerOptions(), {})
    device, why = choose.open_ranks(model, Layout(tp=2), backend)
    assert device == "auto" and why.startswith(told) and bool(why) == bool(told)
    gpus(0)
    runner, why = choose.open_ranks(model, Layout(tp=2), backend)
    assert isinstance(runner, NativeRanks) and not why
    runner.close()


def test_devices_and_ray_choose_gpus_both() -> None:
    config = PytorchEngineConfig(tp=2, devices=[0, 1], distributed_executor_backend="ray")
    with pytest.raises(UsageError, match="devices: found with distributed_executor_backend ray"):
        ranks_of_engine.check(config)


def test_ray_s_gpu_is_found_among_those_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert on_ray.own_gpu("3") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert on_ray.own_gpu("3") == 1
    with pytest.raises(ToolkitError, match="Ray gives the first rank GPU 0, which CUDA_VISIBLE_DEVICES=2,3 hides"):
        on_ray.own_gpu("0")


def test_a_torch_without_nccl_is_told(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match="ranks on GPUs speak by NCCL, which this torch was built without"):
        devices.kind_of_ranks("cuda")


def test_devices_name_a_gpu_for_each_rank() -> None:
    for kind in (TurbomindEngineConfig, PytorchEngineConfig):
        assert kind(devices=[2]).device == "cuda:2"
        assert kind(devices=[2, 0], tp=2).device == "cuda"
        with pytest.raises(UsageError, match="expected one number, for there is one rank"):
            kind(devices=[0, 1])
        with pytest.raises(UsageError, match=r"devices: found .*, expected numbers of GPUs"):
            kind(devices=[0, -1], tp=2)


def test_nccl_is_opened_so_that_it_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch for GPUs has it; the settings are there before, for they are read once."""
    seen: dict[str, Any] = {}

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *given: Any) -> None:
            seen["given"] = given
            seen["env"] = {name: os.environ.get(name) for name in links.NCCL_SETTINGS}

    for name in links.NCCL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    try:
        made = links.NCCL.open("store", "10.0.0.1", 1, 4, 30.0)
    finally:
        for name in links.NCCL_SETTINGS:
            os.environ.pop(name, None)
    store, rank, world, options = seen["given"]
    assert isinstance(made, Nccl) and seen["env"] == links.NCCL_SETTINGS
    assert (store, rank, world, options._timeout.total_seconds()) == ("store", 1, 4, 30.0)
