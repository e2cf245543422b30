"""How many threads to compute with, and how idle ones wait: settled once, before libraries load that compute.

OpenMP's threads spin while they wait for one another. With another process on the cores they spin on the time of the
very thread that they wait for, and work takes up to ten times as long; asleep they cost the waking alone. OpenMP knows
nothing of a container's share of the processors either. Both are told to it by its environment, which child processes
inherit.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, MutableMapping
from contextlib import suppress
from pathlib import Path

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_PROC, _CGROUPS, _CPUS = "proc/self/cgroup", "sys/fs/cgroup", "sys/devices/system/cpu"


def settle(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Set OpenMP's variables where the user has not. No use once torch is imported: it has read them."""
    if not any(name in environ for name in WAITING):
        environ["OMP_WAIT_POLICY"] = "passive"  # no capitals: libgomp reads by the locale, and Turkish has another i
        environ["KMP_BLOCKTIME"] = "0"  # LLVM's and Intel's OpenMP would still spin for 200 ms
    if "OMP_NUM_THREADS" not in environ and (cores := usable_cores(root)) < len(_allowed()):
        environ["OMP_NUM_THREADS"] = str(cores)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those of its affinity mask (a cpuset's included), hyperthreads of one core
    counted once, and no more than the quota of its control group. ``root``: where the system's files are.
    """
    cores = {_siblings(root, cpu) for cpu in _allowed()}
    return max(1, min([len(cores), *(round(quota) for quota in _quotas(root))]))


def give_way() -> None:
    """The calling thread computes when nobody else wants to, where a thread has a priority of its own (Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _siblings(root: Path, cpu: int) -> str:
    """What the hyperthreads of a core have in common; the processor itself where the system does not say."""
    try:
        return (root / _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quotas(root: Path) -> list[float]:
    """Processors that the control groups around this process allow, of either version."""
    found, groups = [], root / _CGROUPS
    for line in _lines(root / _PROC):
        _, controllers, path = line.split(":", 2)
        for folder in _around(path):
            if not controllers:  # version 2
                limit = _lines(groups / folder / "cpu.max")
                quota, period = (limit[0].split() if limit else ("max", "1"))[:2]
            elif "cpu" in controllers.split(","):
                group = groups / controllers / folder
                group = group if group.is_dir() else groups / "cpu" / folder
                quota, period = ((_lines(group / f"cpu.cfs_{name}_us") or ["-1"])[0] for name in ("quota", "period"))
            else:
                continue
            with suppress(ValueError):  # "max"
                if float(quota) > 0 and float(period) > 0:
                    found.append(float(quota) / float(period))
    return found


def _around(path: str) -> list[str]:
    """A group and those that it is in, the root last, as relative paths."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
