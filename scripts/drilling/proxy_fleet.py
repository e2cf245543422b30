"""Servers behind ``tool serve proxy``, each at the other end of a link of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from drilling.fleet import crawl, end, family, stand, tell, url_of
from drilling.relay import Relay
from traffic.servers import START_S, TOOL, Server

from toolkit.engine.process.outage import PATIENCE

KINDS = ("kill", "stop", "stop the engine", "slow", "slow link", "partition", "drain")
SILENCE_S = 120.0  # --node-timeout
DRAIN_S = 60  # --grace-period


class ProxyFleet:
    """Implements ``drilling.fleet.Fleet``."""

    model, where, kinds = "drill", "", KINDS

    def __init__(self, model: Path | str, count: int, flags: list[str], folder: Path) -> None:
        self._path, self._folder = model, folder
        self._flags = ["--model-name", self.model, "--grace-period", str(DRAIN_S), *flags]
        self._ports = {f"server-{i}": _free_port() for i in range(count)}
        self._up: dict[str, Server] = {}
        self._links: dict[str, Relay] = {}
        self._busy: set[str] = set()
        self._starts = 0

    async def __aenter__(self) -> ProxyFleet:
        try:
            for name, port in self._ports.items():
                self._up[name] = await asyncio.to_thread(self._start, name)
                self._links[name] = await Relay(port).start()
            await asyncio.to_thread(self._start_proxy)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if (proxy := getattr(self, "_proxy", None)) is not None:
            await asyncio.to_thread(end, proxy, 20)
        for link in self._links.values():
            await link.close()
        for server in self._up.values():
            tell(family(server.process.pid), signal.SIGCONT)
            await asyncio.to_thread(server.close)

    def _start(self, name: str) -> Server:
        self._starts += 1
        flags = ["--server-port", str(self._ports[name]), *self._flags]
        return Server(self._path, flags, self._folder / f"{name}-{self._starts}.log")

    def _start_proxy(self) -> None:
        log = self._folder / "proxy.log"
        nodes = [part for link in self._links.values() for part in ("--node", f"http://127.0.0.1:{link.port}")]
        flags = ["--server-port", "0", "--heartbeat", "1", "--node-timeout", f"{SILENCE_S:g}", *nodes]
        with log.open("wb") as out:
            self._proxy = subprocess.Popen([*TOOL, "serve", "proxy", *flags], stdout=out, stderr=out)
        self.url = url_of(self._proxy, log, START_S)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.1)
        raise SystemExit(f"the proxy finds no server: {log.read_text()[-2000:]}")

    def servers(self) -> list[str]:
        return [name for name in self._up if name not in self._busy]

    def may_lose(self, kind: str, seconds: float) -> bool:
        most = {"kill": 0.0, "stop": SILENCE_S, "partition": SILENCE_S, "stop the engine": PATIENCE}
        return seconds >= most.get(kind, float("inf"))

    def sent(self, request: str) -> dict[str, float]:
        return {name: link.seen[request] for name, link in self._links.items() if request in link.seen}

    async def disturb(self, kind: str, server: str, seconds: float) -> None:
        self._busy.add(server)
        link, pid = self._links[server], self._up[server].process.pid
        try:
            match kind:
                case "kill" | "drain":
                    link.shut()
                    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
                    gone = self._up[server].process
                    await asyncio.to_thread(gone.wait)
                    await asyncio.sleep(min(seconds, 6))
                    self._up[server] = await asyncio.to_thread(self._start, server)
                    await link.start(link.port)
                case "stop":
                    await stand(family(pid), seconds)
                case "stop the engine":
                    await stand(family(pid)[1:], seconds)
                case "slow":
                    await crawl(family(pid), seconds)
                case "slow link":
                    await link.slow(seconds)
                case "partition":
                    await link.cut(seconds)
        finally:
            self._busy.discard(server)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
