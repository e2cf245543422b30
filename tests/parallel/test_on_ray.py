"""Ranks on machines that a real Ray finds: a head and a worker, in network namespaces that stand for machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
ADDRESS = "10.97.5.1:6399"
TOKEN = {"RAY_AUTH_TOKEN": "between us two machines", "RAY_AUTH_MODE": "token"}


@pytest.fixture
def cluster(machines: list[str], tmp_path: Path) -> Iterator[list[str]]:
    """The machines, on which Ray runs."""
    env = os.environ | TOKEN | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"}
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "2"]
    ray += ["--object-store-memory", str(100 << 20)]
    head = ["--head", "--port", ADDRESS.rpartition(":")[2], "--include-dashboard", "false"]
    head += ["--node-ip-address", "10.97.5.1", "--temp-dir", f"/tmp/r{os.getpid()}"]
    worker = ["--address", ADDRESS, "--node-ip-address", "10.97.5.2"]
    started = []
    try:
        for name, flags in zip(machines, (head, worker), strict=True):
            log = (tmp_path / f"{name}.log").open("wb")
            command = ["ip", "netns", "exec", name, *ray, *flags]
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
            ask = f"import ray; ray.init('{ADDRESS}', logging_level='ERROR'); print(len(ray.nodes()))"
            for _ in range(60):
                done = subprocess.run(
                    ["ip", "netns", "exec", machines[0], sys.executable, "-c", ask],
                    capture_output=True, text=True, env=env, timeout=120,
                )  # fmt: skip
                if done.stdout.strip() == str(len(started)):
                    break
            else:
                pytest.fail(f"{name}: {done.stderr[-2000:]} {(tmp_path / f'{name}.log').read_text()[-2000:]}")
        yield machines
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_ranks_on_two_machines_give_what_one_process_gives(cluster: list[str], tiny_models: Any) -> None:
    path = tiny_models("llama")
    ask = ["--backend", "pytorch", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--session-len", "64"]
    ask += ["--prompt", "Name three colours.", "--max-new-tokens", "8", "--temperature", "0"]
    tool = [sys.executable, "-m", "toolkit", "chat"]
    alone = subprocess.run([*tool, str(path), *ask], capture_output=True, text=True, timeout=200)
    assert alone.returncode == 0, alone.stderr
    env = os.environ | TOKEN | {"RAY_ADDRESS": ADDRESS}
    several = ["--tp", "2", "--nnodes", "2", "--distributed-executor-backend", "ray"]
    command = ["ip", "netns", "exec", cluster[0], *tool, str(path), *ask]
    done = subprocess.run([*command, *several], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone.stdout
    many = ["--tp", "3", "--nnodes", "3", "--distributed-executor-backend", "ray"]
    done = subprocess.run([*command, *many], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 1 and "expected 3 machines (nnodes)" in done.stderr
