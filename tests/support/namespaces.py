"""Network namespaces that stand for two machines, joined by a cable (needs ``ip`` and root)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

FIRST, SECOND = "10.97.5.1", "10.97.5.2"


class Cable:
    """``names``: of the namespaces, which have the addresses FIRST and SECOND; ``ends``: their devices."""

    def __init__(self) -> None:
        self.names = [f"ranks-{os.getpid()}-{i}" for i in (1, 2)]
        self.ends = [f"rk{os.getpid() % 100000}{side}" for side in "ab"]

    def lay(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for name, end, address in zip(self.names, self.ends, (FIRST, SECOND), strict=True):
            _run("ip", "link", "set", end, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Nothing passes any more, what is under way is lost, and nobody is told: as where a switch fails."""
        for name, end in zip(self.names, self.ends, strict=True):
            _run(
                "tc",
                "-n",
                name,
                "qdisc",
                "replace",
                "dev",
                end,
                "root",
                "tbf",
                "rate",
                "8bit",
                "burst",
                "1",
                "limit",
                "1",
            )

    def throttle(self, rate: str, burst: str = "64kb") -> None:
        """No more than ``rate`` ("20mbit") passes, either way."""
        for name, end in zip(self.names, self.ends, strict=True):
            limit = ("rate", rate, "burst", burst, "latency", "400ms")
            _run("tc", "-n", name, "qdisc", "replace", "dev", end, "root", "tbf", *limit)

    def mend(self) -> None:
        """As it was laid."""
        for name, end in zip(self.names, self.ends, strict=True):
            _run("tc", "-n", name, "qdisc", "del", "dev", end, "root", check=False)

    def take_up(self) -> None:
        for name in self.names:
            _run("ip", "netns", "del", name, check=False)


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)


@contextmanager
def cable() -> Iterator[Cable]:
    """Two machines until the end; the test is skipped where there can be none."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip, tc and root")
    made = Cable()
    try:
        try:
            made.lay()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no network namespaces here: {e.stderr.decode().strip()}")
        yield made
    finally:
        made.take_up()
