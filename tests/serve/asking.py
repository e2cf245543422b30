"""How tests ask a server, and end the process of one."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def ask(url: str, path: str, body: Any = None, method: str | None = None, key: str | None = None) -> tuple[int, Any]:
    """Status and JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """The process, which has gone behind the block: it is asked to end, and has to within a minute."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
