"""The process of every rank but the first of a model that the native runner runs; ``ranks.py`` is its other end.

Messages are answered in their order. A step runs while the next one is read, so that ranks do not wait for it.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from toolkit.base import child_process
from toolkit.errors import ToolkitError
from toolkit.parallel import wire
from toolkit.parallel.model import Model
from toolkit.parallel.native_model import NativeRank, open_native, signature
from toolkit.parallel.worker import digest
from toolkit.runners.base import RunnerError, StepHandle
from toolkit.runners.native.share import Share

log = logging.getLogger(__name__)
Answers = queue.SimpleQueue[StepHandle | dict[str, Any]]


def main(fd: int) -> None:
    """Open what the first message says, then run steps until the other end closes."""
    child_process.ignore(signal.SIGINT, signal.SIGTERM)
    with Connection(fd) as pipe, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        told = wire.unpack(pipe.recv_bytes())
        line = f"%(asctime)s %(levelname)s rank {told['rank']}: %(message)s"
        logging.basicConfig(level=told["log_level"], format=line)
        try:
            if told["cores"]:
                os.sched_setaffinity(0, told["cores"][told["rank"]])
            model = Model.from_json(told["model"])
            opened, reason = open_native(model, told["world"], told["rank"])
            if reason is not None:
                raise ToolkitError(f"{model.path}: {reason}")
            memory = os.open(told["memory"], os.O_RDWR)
            runner = NativeRank(opened, model, Share(told["rank"], told["world"], memory))
            pipe.send_bytes(wire.pack({"error": None, "value": signature(opened, Path(model.path))}))
        except (ToolkitError, RuntimeError, OSError) as e:
            pipe.send_bytes(wire.pack({"error": str(e)}))
        else:
            _serve(pipe, runner)
    os._exit(0)  # also in the midst of a step, in which nobody takes part any more


def _serve(pipe: Connection, runner: NativeRank) -> None:
    answers: Answers = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(pipe, answers), name="answers", daemon=True).start()
    while True:
        name, arguments = wire.unpack(pipe.recv_bytes())
        answers.put(runner.submit(*arguments) if name == "submit" else _called(runner, name, arguments))


def _called(runner: NativeRank, name: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        found = getattr(runner, name)(*arguments)
    except (RunnerError, ToolkitError, MemoryError) as e:
        return {"error": str(e) or type(e).__name__, "value": None}
    except Exception as e:
        log.exception("%s failed", name)
        return {"error": f"{type(e).__name__}: {e}", "value": None}
    found = bytes(found) if isinstance(found, memoryview) else found
    return {"error": None, "value": found if isinstance(found, (int, bytes, list)) else None}


def _answer(pipe: Connection, answers: Answers) -> None:
    with suppress(OSError):  # the first rank is gone: the other thread hears of it too
        while True:
            found = answers.get()
            pipe.send_bytes(wire.pack((found if isinstance(found, dict) else _ended(found)) | {"echo": False}))


def _ended(step: StepHandle) -> dict[str, Any]:
    try:
        return {"error": None, "value": digest(step.result())}
    except RunnerError as e:
        return {"error": str(e), "value": None}
