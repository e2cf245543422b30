"""llama.cpp's server as the scripts start it."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PEER = Path(__file__).parent / "peers" / "peer_llama_server.py"


class Running(NamedTuple):
    url: str
    pid: int


@contextmanager
def server(python: str, gguf: str, *more: str) -> Iterator[Running]:
    """One in the environment of ``python``, with ``more`` options of ``peer_llama_server.py``."""
    command = [python, str(PEER), gguf, "--length", "2048", "--threads", "2", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = next((m for line in process.stdout if (m := re.search(r"https?://[\w.:]+", line))), None)
        if found is None:
            raise SystemExit("llama.cpp's server did not start: pip install xllamacpp, and give a .gguf that it reads")
        with urllib.request.urlopen(f"{found[0]}/health", timeout=60):
            yield Running(found[0], process.pid)
    finally:
        process.kill()
        process.wait()
