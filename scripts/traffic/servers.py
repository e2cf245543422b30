"""Servers of ours as the scripts start them: ``tool serve`` with its log in a file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from bench.native import need_native

TOOL = [sys.executable, "-P", "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]
START_S = 120


def converted(model: str, folder: Path) -> Path:
    """An engine artifact of ``model``: itself where it is one, else what is made of it in ``folder``. Ends the program
    where nothing can be: what it is has been said."""
    if (Path(model) / "engine.json").is_file():
        return Path(model)
    if code := subprocess.run([*TOOL, "convert", model, "--dst-path", str(folder / "engine")]).returncode:
        raise SystemExit(code)
    return folder / "engine"


class Served:
    """``tool serve`` with ``words`` until ``close``, or the end of a ``with`` block. It is there when /health says that
    it is well, or, ``idle``, when it says anything: a proxy without servers is not well."""

    def __init__(self, words: list[str], log: Path, *, idle: bool = False) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen([*TOOL, "serve", *words], stdout=out, stderr=out)
        self.url = self._wait(idle)

    def _wait(self, idle: bool) -> str:
        end = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < end:
            if found := re.search(r"is ready.* (http://[\d.]+:\d+)\s", self.text()):
                try:
                    urllib.request.urlopen(f"{found[1]}/health", timeout=START_S).close()
                    return found[1]
                except urllib.error.HTTPError:
                    if idle:
                        return found[1]
                except OSError:
                    pass
            time.sleep(0.1)
        self.close()
        raise SystemExit(f"tool serve did not start: {self.text()[-2000:]}")

    def text(self) -> str:
        """The log."""
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> Any:
        """A JSON answer."""
        with urllib.request.urlopen(self.url + path, timeout=START_S) as reply:
            return json.load(reply)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Server(Served):
    """``tool serve api_server`` on ``model``; leaves with 1 where ``need_native`` does."""

    def __init__(self, model: Path | str, flags: list[str], log: Path) -> None:
        need_native()
        super().__init__(["api_server", str(model), "--server-port", "0", *flags], log)

    def metrics(self) -> dict[str, float]:
        """All of ours that have no labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=START_S) as reply:
            found = re.findall(r"^([\w:]+) (\S+)$", reply.read().decode(), re.MULTILINE)
        return {name: float(value) for name, value in found}

    def processes(self) -> list[Any]:
        """The server's own, then those it has started, the engine's first."""
        import psutil

        me = psutil.Process(self.process.pid)
        return [me, *sorted(me.children(recursive=True), key=lambda child: -child.memory_info().rss)]
