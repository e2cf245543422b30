"""The engine loop in a process of its own, so that it shares no interpreter lock with the HTTP server.

``worker.py`` is the other end. Not by multiprocessing, which would run the user's main script again in the child.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from toolkit.base import child_process, json_lines
from toolkit.engine.load.setup import Facts, Progress, Setup, set_up_after
from toolkit.engine.process import records
from toolkit.engine.process.loop import OnDown, OnOutputs
from toolkit.engine.process.outage import Budget, Outage, exit_text
from toolkit.engine.process.outbox import Outbox
from toolkit.engine.process.stall import Stall
from toolkit.engine.process.suspects import Suspects
from toolkit.engine.request import EngineOutput, EngineRequest
from toolkit.engine.sequence import LogitsProcessor
from toolkit.errors import ToolkitError, UsageError

log = logging.getLogger(__name__)
WATCH_SECONDS = 1.0  # how often the watch looks whether the process gets on
CLOSE_SECONDS = 10.0  # that a process gets to end by itself
SENT_BYTES = 1 << 14  # that wait to be read, about: the rest waits where users take turns
PICTURES = "pictures"  # lane of requests with some: a later one goes without the pixels that an earlier one brought


class Child:
    """The process and the pipe to it. It imports what engines need, then waits to be told what to open; where it never
    is, it ends with this one. Raises ToolkitError where the system has no file, process or memory for it."""

    def __init__(self) -> None:
        try:
            mine, theirs = socket.socketpair()
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)
            with mine, theirs:
                self.process = child_process.start(
                    "toolkit.engine.process.worker",
                    theirs,
                    stdout=2,  # standard output is the command's own
                    env=os.environ | {"PYTHONUNBUFFERED": "1"},
                )
                self.pipe = Connection(mine.detach())
        except OSError as e:
            raise ToolkitError(f"the engine's process cannot be started: {e}") from e

    def told(self, setup: Setup) -> Child:
        """Itself, as it begins to open ``setup``."""
        with suppress(OSError):  # a child that died at once is noticed when its answer is read
            level = logging.getLogger("toolkit").getEffectiveLevel()
            told = {"op": "open", "setup": setup.to_json(), "log_level": level, "log_json": json_lines.are_written()}
            self.pipe.send_bytes(records.pack(told))
        return self

    def kill(self) -> None:
        """End it at once, wherever it is."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class ProcessLoop:
    """The loop in a child process, which is started anew when it dies or stands still. Same methods as ``ThreadLoop``.

    Nothing here waits for the child but its opening and ``close``. ``patience``: seconds without a sign of life, while
    requests wait, after which it counts as hung; 0 = never.
    """

    def __init__(
        self,
        setup: Setup,
        on_outputs: OnOutputs,
        on_down: OnDown,
        progress: Progress,
        patience: float,
        child: Child | None = None,
    ) -> None:
        """``child``: one that has been told to open ``setup`` already."""
        self._setup = setup
        self._on_outputs = on_outputs
        self._on_down = on_down
        self._stats: dict[str, Any] = {}
        self._budget = Budget()
        self._suspects = Suspects()
        self._open: dict[str, EngineRequest] = {}  # sent and not ended
        # sent and not answered, and how a child to come is set up if they succeed; answers come in order
        self._calls: deque[tuple[Future[Any], Callable[[Setup], Setup]]] = deque()
        self._lock = threading.RLock()  # over those above and below
        self._closing = threading.Event()
        self.outage: Outage | None = None
        self._hung = ""  # why the process ends, as the watch that killed it or it itself says
        child = child or Child().told(setup)
        self._process, self._pipe = child.process, child.pipe
        try:
            self.facts = _await_ready(self._process, self._pipe, progress)
        except BaseException:
            child.kill()  # while it loads it would not hear a "close"
            raise
        self._outbox = Outbox(self._pipe)
        self._stall = Stall(self._process.pid, patience)
        self._thread = threading.Thread(target=self._receive, name="toolkit-engine-pipe", daemon=True)
        self._thread.start()
        if patience:
            threading.Thread(target=self._watch, name="toolkit-engine-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, request: EngineRequest, processors: Sequence[LogitsProcessor]) -> None:
        if processors:
            raise UsageError("logits_processors: expected an engine in this process (pipeline); leave them out")
        with self._lock:
            if self.outage is not None:
                raise ToolkitError(str(self.outage))
            if self._outbox.full:
                raise ToolkitError("the engine does not take requests as fast as they come; try again later")
            if self._suspects.admit(request):
                self._start(request)

    def abort(self, request_id: str) -> None:
        with self._lock:
            held = self._suspects.drop(request_id)
            if not held:
                self._outbox.put(records.pack({"op": "abort", "id": request_id}), _lane(self._open.get(request_id)))
        if held:
            self._on_outputs([EngineOutput(request_id, finish_reason="abort")])

    def end_session(self, name: str) -> None:
        with self._lock:
            self._outbox.put(records.pack({"op": "end_session", "name": name}))

    def call(self, name: str, arguments: Sequence[Any]) -> Future[Any]:
        with self._lock:
            if self.outage is not None:
                raise ToolkitError(str(self.outage))
            try:  # before anything waits for the answer: answers come in order
                data = records.pack({"op": "call", "name": name, "arguments": list(arguments)})
            except TypeError as e:  # a path that is no UTF-8
                raise UsageError(f"{name}: {list(arguments)!a:.200} cannot be told to the engine: {e}") from e
            for request in self._suspects.release(arguments[0]) if name == "unload_adapter" else ():
                self._start(request)
            future: Future[Any] = Future()
            self._calls.append((future, partial(set_up_after, name, list(arguments))))
            self._outbox.put(data)
            return future

    def stats(self) -> dict[str, Any]:
        return dict(self._stats)

    def close(self) -> None:
        """End the process."""
        self._closing.set()
        with self._lock:
            process, up = self._process, self.outage is None
            self.outage = Outage("it was closed", restarting=False)
            self._outbox.put(records.pack({"op": "close"}))
        if not up:  # it loads, or is gone
            process.kill()
        try:
            process.wait(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._thread.join(timeout=CLOSE_SECONDS)
        with self._lock:
            while self._calls:
                self._calls.popleft()[0].set_exception(ToolkitError(str(self.outage)))

    # -- from the child -------------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            try:
                message, data = records.unpack(self._pipe.recv_bytes())
            except (EOFError, OSError):
                self._outbox.close()
                if self._closing.is_set() or not self._restart():
                    self._pipe.close()
                    return
                continue
            self._stall.sign()
            if message["op"] == "answer":
                with self._lock:
                    future, change = self._calls.popleft()
                    if message["error"] is None:
                        self._setup = change(self._setup)
                    _answer(future, message)
            if message["op"] == "lost":
                self._hung = message["why"]
            if message["op"] == "outputs":
                self._stats = message["stats"]
                if message["outputs"]:
                    outputs = records.read_outputs(message, data)
                    self._settle(outputs)
                    self._on_outputs(outputs)

    def _settle(self, outputs: list[EngineOutput]) -> None:
        """Keep the books of what runs; send the next suspect where one may come."""
        with self._lock:
            for output in outputs:
                if output.finish_reason is None:
                    next_one = self._suspects.proven(output.id) if output.token_ids else None
                else:
                    self._forget(self._open.pop(output.id, None))
                    next_one = self._suspects.ended(output.id)
                if next_one is not None:
                    self._start(next_one)

    def _start(self, request: EngineRequest) -> None:
        """Send it, without the pixels of pictures that others which run have sent."""
        data = records.pack_add(request, self._pictures() if request.pictures else ())
        self._open[request.id] = request
        self._outbox.put(data, _lane(request))

    def _forget(self, ended: EngineRequest | None) -> None:
        """Tell the child of pictures that nothing which runs has any more."""
        if ended is not None and ended.pictures:
            gone = {picture.digest for picture in ended.pictures} - self._pictures()
            self._outbox.put(records.pack({"op": "forget", "digests": [digest.hex() for digest in gone]}), PICTURES)

    def _pictures(self) -> set[bytes]:
        """Digests of those that the child has."""
        return {picture.digest for request in self._open.values() for picture in request.pictures}

    def _watch(self) -> None:
        """Kill a process that stands still: what comes then is what comes after any death."""
        while not self._closing.wait(WATCH_SECONDS):
            with self._lock:
                busy = bool(self._open) and self.outage is None
                if self._stall.hung(busy):
                    self._hung = f"it made no progress for {self._stall.patience:g} s while requests waited"
                    self._process.kill()

    # -- death and return -----------------------------------------------------------------------

    def _restart(self) -> bool:
        """The child is gone: fail what was in flight and start another. False if that is no use."""
        code = self._process.wait()
        why, self._hung = self._hung or exit_text(code), ""
        self._stats = {}
        while True:
            with self._lock:
                outage = self.outage = Outage(why, restarting=self._budget.spend())
                self._suspects.crashed(self._open.values())
                self._open.clear()
                while self._calls:
                    self._calls.popleft()[0].set_exception(ToolkitError(str(outage)))
            log.error("%s", outage)
            self._on_down(outage)
            if not outage.restarting or self._closing.wait(self._budget.pause):
                return False
            try:
                with self._lock:
                    if self._closing.is_set():
                        return False
                    self._pipe.close()
                    child = Child().told(self._setup)
                    self._process, self._pipe = child.process, child.pipe
                self.facts = _await_ready(self._process, self._pipe, lambda text: None)
                outbox = Outbox(self._pipe)
            except (ToolkitError, RuntimeError) as e:  # RuntimeError: no thread could be started
                self._process.kill()  # without effect where there is no new one
                self._process.wait()
                why = f"it could not be started again: {e}"
                continue
            with self._lock:
                if self._closing.is_set():
                    return False
                self._outbox = outbox
                self._stall = Stall(self._process.pid, self._stall.patience)
                self.outage = None
            return True


def _lane(request: EngineRequest | None) -> str:
    """In which a request goes to the child, and its end behind it."""
    if request is None:
        return ""
    return PICTURES if request.pictures else f"user {request.whose.user}"


def _answer(future: Future[Any], message: dict[str, Any]) -> None:
    """What the core's method raised or returned."""
    if message["error"] is None:
        future.set_result(message["result"])
    else:
        future.set_exception((UsageError if message["usage"] else ToolkitError)(message["error"]))


def _await_ready(process: subprocess.Popen[bytes], pipe: Connection, progress: Callable[[str], None]) -> Facts:
    """Wait until the child is ready. Raises its ToolkitError or UsageError."""
    while True:
        try:
            message, _ = records.unpack(pipe.recv_bytes())
        except (EOFError, OSError) as e:
            raise ToolkitError(f"the engine failed while it was loading ({exit_text(process.wait())})") from e
        if message["op"] == "ready":
            return Facts.from_json(message["facts"])
        if message["op"] == "failed":
            raise (UsageError if message["usage"] else ToolkitError)(message["error"])
        progress(message["text"])
