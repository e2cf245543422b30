"""Replicas of ``tool serve ray``, found by their processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from drilling.fleet import crawl, end, family, stand, tell, url_of
from traffic.servers import TOOL

from toolkit.engine.process.outage import PATIENCE

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
        await asyncio.to_thread(end, self._process, 60)

    def _started(self) -> None:
        self.url = url_of(self._process, self._log, START_S)
        until = time.monotonic() + START_S
        while len(self._tags()) < self._count and time.monotonic() < until:
            time.sleep(0.5)

    def _tags(self) -> dict[str, int]:
        """Replicas that answer, and their processes."""
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            found = re.findall(r'^toolkit:replica_process\{replica="(\w+)"\} (\S+)$', reply.read().decode(), re.M)
            return {tag: int(float(pid)) for tag, pid in found}
        return {}

    def servers(self) -> list[str]:
        return list(self._tags())

    def may_lose(self, kind: str, seconds: float) -> bool:
        most = {"stop": HANGS_S, "stop the engine": PATIENCE}
        return kind.startswith("kill") or seconds >= most.get(kind, float("inf"))

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
        until = time.monotonic() + START_S
        while time.monotonic() < until and len(await asyncio.to_thread(self._tags)) < self._count:
            await asyncio.sleep(0.5)
        while kind == "kill the engine" and time.monotonic() < until:
            if await asyncio.to_thread(self._answers) == server:
                return
            await asyncio.sleep(0.5)

    def _answers(self) -> str:
        """Which replica answers a question that none has had before, "" where none does."""
        asked = {"model": self.model, "prompt": f"{time.monotonic()}", "max_tokens": 1}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
        )
        with suppress(OSError), urllib.request.urlopen(request, timeout=30) as reply:
            return str(reply.headers.get(self.where, ""))
        return ""
