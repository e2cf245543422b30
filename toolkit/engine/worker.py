"""The engine loop in a process of its own, so that it shares no interpreter lock with the HTTP server.

``python -P -c "from toolkit.engine.worker import main; main(FD)"`` speaks ``records.py``'s messages over socket FD. Not
by multiprocessing, which would run the user's main script again in the child.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from toolkit.engine import records
from toolkit.engine.loop import OnDown, OnOutputs
from toolkit.engine.request import EngineRequest
from toolkit.engine.sequence import LogitsProcessor
from toolkit.engine.setup import Facts, Progress, Setup, start
from toolkit.errors import ToolkitError, UsageError

log = logging.getLogger(__name__)
MAX_RESTARTS = 3  # in a row, without an output in between
STATS_SECONDS = 0.1  # how often an otherwise silent loop sends its figures at most
GATHER_SECONDS = 0.01  # tokens of steps that are shorter go together: on a CPU the front end's work is the steps' loss


# -- the child ----------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Open what the first message says, then run requests until the other end closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the front end's to handle
        signal.signal(number, signal.SIG_IGN)
    with Connection(fd) as pipe, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        first, _ = records.unpack(pipe.recv_bytes())
        logging.basicConfig(level=first["log_level"], format="%(asctime)s %(levelname)s engine: %(message)s")
        core = _open(pipe, first["setup"])
        if core is not None:
            try:
                _serve(pipe, core)
            finally:
                core.runner.close()


def _open(pipe: Connection, setup: dict[str, Any]) -> Any:
    from toolkit.artifacts.tokenizer import Tokenizer

    def progress(text: str) -> None:
        pipe.send_bytes(records.pack({"op": "progress", "text": text}))

    try:
        what = Setup.from_json(setup)
        core, facts = start(what, Tokenizer.open(what.tokenizer_dir), progress)
    except ToolkitError as e:
        pipe.send_bytes(records.pack({"op": "failed", "error": str(e), "usage": isinstance(e, UsageError)}))
        return None
    except Exception as e:
        log.exception("the engine could not be opened")
        pipe.send_bytes(records.pack({"op": "failed", "error": f"{type(e).__name__}: {e}", "usage": False}))
        return None
    pipe.send_bytes(records.pack({"op": "ready", "facts": facts.to_json()}))
    return core


def _serve(pipe: Connection, core: Any) -> None:
    sent, ready = 0.0, []
    known: set[str] = set()  # requests that have sent something
    while True:
        while pipe.poll(0 if core.has_work else None):
            message, _ = records.unpack(pipe.recv_bytes())
            op = message["op"]
            if op == "add":
                core.add(records.read_request(message))
            elif op == "abort":
                core.abort(message["id"])
            elif op == "end_session":
                core.end_session(message["name"])
            elif op == "close":
                return
        ready += core.step()
        now = time.monotonic()
        wait = GATHER_SECONDS if ready else STATS_SECONDS
        urgent = any(o.finish_reason is not None or o.id not in known for o in ready)  # nobody waits for a first token
        if urgent or now - sent > wait or not core.has_work:
            pipe.send_bytes(records.pack_outputs(ready, core.stats()))
            known |= {o.id for o in ready}
            known -= {o.id for o in ready if o.finish_reason is not None}
            sent, ready = now, []


# -- the parent ---------------------------------------------------------------------------------


class ProcessLoop:
    """The loop in a child process, which is started anew when it dies. Same methods as ``ThreadLoop``."""

    def __init__(self, setup: Setup, on_outputs: OnOutputs, on_down: OnDown, progress: Progress) -> None:
        self._setup = setup
        self._on_outputs = on_outputs
        self._on_down = on_down
        self._stats: dict[str, Any] = {}
        self._closing = False
        self._restarts = 0
        self._sending = threading.Lock()
        self._process, self._pipe = _spawn(setup)
        try:
            self.facts = _await_ready(self._process, self._pipe, progress)
        except BaseException:
            self._process.kill()  # while it loads it would not hear a "close"
            self._stop()
            raise
        self._up = True
        self._thread = threading.Thread(target=self._receive, name="toolkit-engine-pipe", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._up

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, request: EngineRequest, processors: Sequence[LogitsProcessor]) -> None:
        if processors:
            raise UsageError("logits_processors: only where the engine runs in this process (pipeline)")
        self._send(records.pack_add(request))

    def abort(self, request_id: str) -> None:
        self._send(records.pack({"op": "abort", "id": request_id}))

    def end_session(self, name: str) -> None:
        self._send(records.pack({"op": "end_session", "name": name}))

    def stats(self) -> dict[str, Any]:
        return dict(self._stats)

    def close(self) -> None:
        """End the process."""
        self._closing = True
        self._up = False
        self._send(records.pack({"op": "close"}))
        self._stop()

    def _send(self, data: bytes) -> None:
        with self._sending, suppress(OSError, ValueError):  # a dead child is noticed by the receiving thread
            self._pipe.send_bytes(data)

    def _stop(self) -> None:
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._sending:
            self._pipe.close()

    def _receive(self) -> None:
        while True:
            try:
                message, data = records.unpack(self._pipe.recv_bytes())
            except (EOFError, OSError):
                if self._closing or not self._restart():
                    return
                continue
            if message["op"] == "outputs":
                self._stats = message["stats"]
                if message["outputs"]:
                    self._restarts = 0
                    self._on_outputs(records.read_outputs(message, data))

    def _restart(self) -> bool:
        """The child is gone: fail what was in flight and start another. False if that is no use."""
        self._up = False
        code = self._process.wait()
        self._restarts += 1
        again = self._restarts <= MAX_RESTARTS
        log.error("the engine process ended with code %s; %s", code, "restarting it" if again else "giving up")
        self._stats = {}
        self._on_down(f"its process ended with code {code}", again)
        if not again:
            return False
        with self._sending:
            self._pipe.close()
            self._process, self._pipe = _spawn(self._setup)
        try:
            self.facts = _await_ready(self._process, self._pipe, lambda text: None)
        except ToolkitError as e:
            log.error("the engine could not be restarted: %s", e)
            return not self._closing and self._restart()
        self._up = True
        return True


def _spawn(setup: Setup) -> tuple[subprocess.Popen[bytes], Connection]:
    mine, theirs = socket.socketpair()
    code = f"from toolkit.engine.worker import main; main({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is the command's own
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    theirs.close()
    pipe = Connection(mine.detach())
    with suppress(OSError):  # a child that died at once is noticed when its answer is read
        level = logging.getLogger("toolkit").getEffectiveLevel()
        pipe.send_bytes(records.pack({"op": "open", "setup": setup.to_json(), "log_level": level}))
    return process, pipe


def _await_ready(process: subprocess.Popen[bytes], pipe: Connection, progress: Callable[[str], None]) -> Facts:
    """Wait until the child is ready. Raises its ToolkitError or UsageError."""
    while True:
        try:
            message, _ = records.unpack(pipe.recv_bytes())
        except (EOFError, OSError) as e:
            raise ToolkitError(f"the engine process ended with code {process.wait()} while it was loading") from e
        if message["op"] == "ready":
            return Facts.from_json(message["facts"])
        if message["op"] == "failed":
            raise (UsageError if message["usage"] else ToolkitError)(message["error"])
        progress(message["text"])
