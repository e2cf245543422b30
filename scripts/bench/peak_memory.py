"""The most memory that a peer's process held."""

from __future__ import annotations

from pathlib import Path


def peak_memory_mib() -> float:
    """Largest resident set of this process so far, in MiB.

    Not ``getrusage``: its figure begins with what the process that started this one held (Linux, ``exec_mmap``).
    """
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(held.split()[1]) / 1024
