"""A shell for what pages show: their lines as they stand, in a directory of its own, on ports that are free."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

PORTS = re.compile(r"\b(2333[345]|8000)\b")  # that the pages name
SERVES = re.compile(r"^(?:\w+=\S+ )*tool serve (api_server|proxy)\b")
SETS = re.compile(r"^(?:export )?(\w+)=(\S+|\"[^\"]*\")$")


class Shell:
    """Runs lines and Python one after another; a server that is started stays until ``close``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[str, subprocess.Popen[str]] = {}  # by port
        self._ports: dict[str, str] = {}
        (folder / "bin").mkdir()
        tool = folder / "bin" / "tool"
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m toolkit "$@"\n')
        tool.chmod(0o755)
        self.env = os.environ | {"PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def here(self, text: str) -> str:
        """``text`` with this shell's ports in the place of those that pages name."""
        return PORTS.sub(lambda found: self._port(found[0]), text)

    def _port(self, shown: str) -> str:
        if shown not in self._ports:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                self._ports[shown] = str(s.getsockname()[1])
        return self._ports[shown]

    def run(self, line: str) -> str:
        """What a line prints; a server is started where its port has none yet."""
        line = self.here(line)
        if found := SETS.match(line):
            self.env[found[1]] = found[2].strip('"')
            return ""
        if served := SERVES.match(line):
            self._serve(line, served[1])
            return ""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.env, capture_output=True, text=True, input="Hello\n"
        )
        assert done.returncode == 0, (line, done.stderr[-2000:])
        return done.stdout

    def python(self, code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-c", self.here(code)], cwd=self.folder, env=self.env, capture_output=True, text=True
        )
        assert done.returncode == 0, (code, done.stderr[-2000:])
        return done.stdout

    def _serve(self, line: str, kind: str) -> None:
        given = re.search(r"--server-port (\d+)", line)
        port = given[1] if given else self._port("23333" if kind == "api_server" else "8000")
        if port in self.servers:
            return
        line = "exec env " + line if given else f"exec env {line} --server-port {port}"
        server = subprocess.Popen(
            ["bash", "-c", line], cwd=self.folder, env=self.env, stderr=subprocess.PIPE, text=True
        )
        self.servers[port] = server
        until = time.monotonic() + 120
        while time.monotonic() < until and server.poll() is None:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", int(port))) == 0:
                    return
            time.sleep(0.1)
        server.kill()
        assert server.stderr is not None
        raise AssertionError(f"{line}: the server left: {server.stderr.read()[-2000:]}")

    def close(self) -> None:
        for server in reversed(self.servers.values()):
            server.terminate()
        for server in self.servers.values():
            said = server.communicate(timeout=60)[1]
            assert server.returncode == 0, said[-2000:]
