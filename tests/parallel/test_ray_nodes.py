"""A real Ray on two machines, which are network namespaces: one has the head and the engine, the other the ranks."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[1] / "support" / "far_engine.py"
PORT = 6391
CONFIG = {"dtype": "float32", "session_len": 256, "device_type": "cpu", "threads": 2, "block_size": 16}
PROMPT = np.random.default_rng(9).integers(3, 300, 60).tolist()
ASK = ["ask", {"prompt": PROMPT, "tokens": 16}]
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]


def pids(machine: str) -> list[int]:
    """All processes of a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True).stdout
    return list(map(int, listed.split()))


class Cluster:
    """Ray's head, which has no cores to give, on the first machine, and three cores on the second."""

    def __init__(self, names: list[str], first: str, second: str, folder: str) -> None:
        self.names = names
        self.env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64, "TOOLKIT_RANKS_TIMEOUT": "60"}
        small = ["--object-store-memory=80000000", "--disable-usage-stats"]
        head = ["--head", f"--node-ip-address={first}", f"--port={PORT}", "--num-cpus=0", f"--temp-dir={folder}"]
        other = [f"--address={first}:{PORT}", f"--node-ip-address={second}", "--num-cpus=3"]
        self.address = f"{first}:{PORT}"
        self.nodes = [self.on(0, [*RAY, *head, "--include-dashboard=false", *small])]
        time.sleep(5)  # the head listens, or the other asks again
        self.nodes.append(self.on(1, [*RAY, *other, *small]))

    def on(self, machine: int, command: list[str], **more: Any) -> subprocess.Popen[str]:
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        inside = ["ip", "netns", "exec", self.names[machine], *command]
        return subprocess.Popen(inside, env=self.env, text=True, **(quiet | more))

    def engine(self, model: Path, deeds: list[Any], **more: Any) -> subprocess.Popen[str]:
        """On the first machine; its other ranks are actors."""
        self.env["RAY_ADDRESS"] = self.address
        fields = CONFIG | {"distributed_executor_backend": "ray"} | more
        command = [sys.executable, str(PROGRAM), str(model), "pytorch", json.dumps(fields), json.dumps(deeds)]
        return self.on(0, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ranks(self) -> list[int]:
        """Processes of ranks on the second machine."""
        found = []
        for pid in pids(self.names[1]):
            try:
                found += [pid] if "toolkit.parallel.worker" in " ".join(psutil.Process(pid).cmdline()) else []
            except psutil.Error:
                continue
        return found

    def stop(self) -> None:
        for name in self.names:
            for pid in pids(name):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster(support: Any) -> Iterator[Cluster]:
    namespaces = support("namespaces")
    with namespaces.cable() as cable:
        for name, end in zip(cable.names, cable.ends, strict=True):  # by which Ray finds a machine's own address
            subprocess.run(["ip", "-n", name, "route", "add", "default", "dev", end], check=True)
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # of sockets, whose paths are short
        made = Cluster(cable.names, namespaces.FIRST, namespaces.SECOND, folder)
        try:
            yield made
        finally:
            made.stop()
            for node in made.nodes:
                node.wait(30)
            shutil.rmtree(folder, ignore_errors=True)


def alone(model: Path) -> Any:
    command = [sys.executable, str(PROGRAM), str(model), "pytorch", json.dumps(CONFIG), json.dumps([ASK])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def seen(cluster: Cluster, process: subprocess.Popen[str]) -> list[int]:
    """Ranks on the second machine, as soon as there are some."""
    while process.poll() is None:
        if found := cluster.ranks():
            return found
        time.sleep(0.05)
    raise AssertionError(process.communicate()[1][-2000:])


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_ranks_on_another_machine_give_what_one_process_gives(
    layout: dict[str, int], cluster: Cluster, tiny_models: Any
) -> None:
    model = tiny_models("llama")
    running = cluster.engine(model, [ASK], **layout)
    ranks = seen(cluster, running)
    told, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors[-2000:]
    assert len(ranks) <= math.prod(layout.values()) - 1
    assert json.loads(told.splitlines()[-1])[0][0][0] == alone(model)[0][0][0]


def test_a_rank_that_is_killed_on_another_machine_ends_the_engine(cluster: Cluster, tiny_models: Any) -> None:
    running = cluster.engine(tiny_models("llama"), [["ask", {"prompt": PROMPT[:8], "tokens": 200}]] * 300, tp=2)
    (rank,) = seen(cluster, running)
    time.sleep(5)
    os.kill(rank, signal.SIGKILL)
    began = time.monotonic()
    _, errors = running.communicate(timeout=100)
    assert running.returncode and "rank 1" in errors and time.monotonic() - began < 60
