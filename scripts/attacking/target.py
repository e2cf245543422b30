"""What an attack gets: the server that is attacked, and how it is asked."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHAT = "/v1/chat/completions"
LONG = 120.0  # seconds after which an answer is given up
LOST = "NOT HELD: "  # how a line begins that tells of somebody else's loss


@dataclass(frozen=True)
class Target:
    """``worker``: process id of the engine; ``model``: the directory that is served, a copy that may be spoilt."""

    url: str
    worker: int
    model: Path

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> str:
        """Status and beginning of the answer."""
        data = json.dumps({"model": "target", "max_tokens": 8, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LONG) as reply:
                return f"{reply.status}"
        except urllib.error.HTTPError as error:
            with contextlib.suppress(ValueError, LookupError):
                return f"{error.code}: {json.loads(error.read())['error']['message']}"
            return f"{error.code}"
        except OSError as error:
            return f"no answer ({error})"

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=LONG)

    def health(self) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=LONG) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait(self, status: int, seconds: float, restarting: bool | None = None) -> str:
        """Until ``/health`` has this status; what it said last, and after how long."""
        started = time.monotonic()
        while True:
            found, said = self.health()
            took = time.monotonic() - started
            if found == status and restarting in (None, said.get("restarting")):
                return f"/health {found} after {took:.1f} s: {said.get('reason', said['status'])}"
            if took > seconds:
                return f"/health still {found} after {took:.0f} s"
            time.sleep(0.1)
