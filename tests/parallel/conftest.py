"""Two machines that are network namespaces of this one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


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
