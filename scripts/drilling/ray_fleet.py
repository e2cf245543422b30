"""Replicas of ``tool serve ray``, found by their processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from drilling.fleet import crawl, family, stand, tell
from traffic.servers import TOOL

START_S = 300.0
KINDS = ("kill", "stop", "stop the engine", "slow", "kill the engine")
HEALTH = ["--health-check-period-s", "2", "--health-check-timeout-s", "10"]
HANGS_S = 20.0  # of silence after which Ray Serve may replace one


class RayFleet:
    """Implements ``drilling.fleet.Fleet``. A server is called after the replica that it is when it is looked for."""

    model, where, kinds = "drill", "x-toolkit-replica", KINDS

    def __init__(self, model: Path | str, count: int, flags: list[str], folder: Path) -> None:
        self._count, self._log = count, folder / "ray.log"
        self._command = [*TOOL, "serve", "ray", str(model), "--model-name", self.model, "--server-port", "0"]
        self._command += ["--replicas", str(count), *HEALTH, *flags]
        self._names: dict[int, str] = {}

    async def __aenter__(self) -> RayFleet:
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out)
        try:
            await asyncio.to_thread(self._started)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        tell(family(self._process.pid), signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, 60)
        self._process.kill()
        self._process.wait()

    def _started(self) -> None:
        end = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < end:
            if found := re.search(r"ready at (http://[\d.]+:\d+)", self._log.read_text(errors="replace")):
                self.url = found[1]
                while len(self._tags()) < self._count and time.monotonic() < end:
                    time.sleep(0.5)
                return
            time.sleep(0.2)
        raise SystemExit(f"the deployment did not start: {self._log.read_text()[-2000:]}")

    def _tags(self) -> dict[str, int]:
        """Replicas that answer, and their processes."""
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            found = re.findall(r'^toolkit:replica_process\{replica="(\w+)"\} (\S+)$', reply.read().decode(), re.M)
            return {tag: int(float(pid)) for tag, pid in found}
        return {}

    def servers(self) -> list[str]:
        return list(self._tags())

    def may_lose(self, kind: str, seconds: float) -> bool:
        return kind.startswith("kill") or (kind == "stop" and seconds >= HANGS_S)

    def sent(self, request: str) -> dict[str, float]:
        return {}  # answers say it themselves

    async def disturb(self, kind: str, server: str, seconds: float) -> None:
        pid = (await asyncio.to_thread(self._tags)).get(server)
        if pid is None:
            return
        match kind:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "kill the engine":
                tell(family(pid)[1:], signal.SIGKILL)
            case "stop":
                await stand([pid], seconds)
            case "stop the engine":
                await stand(family(pid)[1:], seconds)
            case "slow":
                await crawl(family(pid), seconds)
        end = time.monotonic() + START_S
        while time.monotonic() < end and len(await asyncio.to_thread(self._tags)) < self._count:
            await asyncio.sleep(0.5)
