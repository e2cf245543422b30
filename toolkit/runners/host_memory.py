"""How much memory this process may still use."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    # version 2, then version 1: limit, usage, statistics, name of the reclaimable page cache in them
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_host_bytes() -> int:
    """Bytes that are free on the machine and, where a cgroup limits us, within its limit."""
    free = _available()
    for limit, usage, stat, reclaimable in _CGROUPS:
        try:
            most = Path(limit).read_text().strip()
            if not most.isdigit():  # "max"
                continue
            used = int(Path(usage).read_text())
            fields = dict(line.split() for line in Path(stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        free = min(free, int(most) - used + int(fields.get(reclaimable, 0)))
    return max(free, 0)


def host_bytes() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available() -> int:
    """Of the machine; where it is Linux that is read from the kernel itself."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)
