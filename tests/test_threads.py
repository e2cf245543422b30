"""How many threads, and how they wait: by the machine's files, and by what child processes find around them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.base import threads

CPUS = "sys/devices/system/cpu"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight processors of four cores, no control group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for cpu in range(8):
        write(tmp_path / CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_hyperthreads_of_a_core_count_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads.usable_cores(machine) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 2}, raising=False)  # a cpuset
    assert threads.usable_cores(machine) == 2
    assert threads.usable_cores(machine / "nowhere") == 3


@pytest.mark.parametrize(
    "quota, cores", [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("250001 100000", 3)]
)
def test_a_quota_of_a_version_2_group_or_one_around_it(machine: Path, quota: str, cores: int) -> None:
    write(machine / "proc/self/cgroup", "0::/pod/box\n")
    write(machine / "sys/fs/cgroup" / "pod" / "cpu.max", quota + "\n")
    write(machine / "sys/fs/cgroup" / "pod" / "box" / "cpu.max", "max 100000\n")
    assert threads.usable_cores(machine) == cores


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_a_quota_of_a_version_1_group(machine: Path, folder: str) -> None:
    write(machine / "proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n")
    write(machine / "sys/fs/cgroup" / folder / "cpu.cfs_quota_us", "-1\n")
    write(machine / "sys/fs/cgroup" / folder / "docker" / "abc" / "cpu.cfs_quota_us", "300000\n")
    write(machine / "sys/fs/cgroup" / folder / "docker" / "abc" / "cpu.cfs_period_us", "100000\n")
    assert threads.usable_cores(machine) == 3


def test_a_container_finds_its_quota_at_the_root(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/../../somewhere\n")
    write(machine / "sys/fs/cgroup" / "cpu.max", "100000 100000\n")
    assert threads.usable_cores(machine) == 1


def test_what_the_user_has_set_stays(machine: Path) -> None:
    found: dict[str, str] = {}
    threads.settle(found, machine)
    assert found == {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "OMP_NUM_THREADS": "4"}
    for name in threads.WAITING:
        own = {name: "7", "OMP_NUM_THREADS": "3"}
        threads.settle(own, machine)
        assert own == {name: "7", "OMP_NUM_THREADS": "3"}


PROGRAM = """
import os, subprocess, sys
import toolkit
assert "torch" not in sys.modules
import torch
child = [sys.executable, "-c", "import os; print(os.environ['OMP_WAIT_POLICY'], end='')"]
print(torch.get_num_threads(), toolkit.base.threads.usable_cores(), subprocess.run(child, capture_output=True).stdout)
"""


def test_a_script_that_imports_us_first_computes_with_settled_threads() -> None:
    env = {k: v for k, v in os.environ.items() if k not in (*threads.WAITING, "OMP_NUM_THREADS")}
    env["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stderr
    count, cores, inherited = done.stdout.split()
    assert count == cores and inherited == "b'passive'"
    shown = {k: v for k, _, v in (line.strip().partition(" = ") for line in done.stderr.splitlines())}
    assert shown.get("GOMP_SPINCOUNT", shown.get("KMP_BLOCKTIME", "'0'")) == "'0'", done.stderr
