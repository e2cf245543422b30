"""The process of every rank but the first of a model that the native runner runs; ``ranks.py`` is its other end.

Messages are answered in their order. A step runs while the next one is read, so that ranks do not wait for it.
"""

from __future__ import annotations

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
from toolkit.parallel.bridge import SHARED, Bridge
from toolkit.parallel.model import Model
from toolkit.parallel.native_model import NativeRank, open_native, signature
from toolkit.parallel.places import cores_of
from toolkit.parallel.worker import address, called, first_message, until_it_is_gone
from toolkit.runners.base import RunnerError, StepHandle
from toolkit.runners.native.library import instructions
from toolkit.runners.native.share import Share

Answers = queue.SimpleQueue[StepHandle | dict[str, Any]]


def main(fd: int) -> None:
    """Open what the first message says, then run steps until the other end closes."""
    child_process.ignore(signal.SIGINT, signal.SIGTERM)
    ended, own = False, address(fd)
    if own:
        child_process.end_with_parent()  # the first rank, far away, would not notice
    with Connection(fd) as pipe, until_it_is_gone():
        told = first_message(pipe)
        try:
            rank, world, here, store = (told[name] for name in ("rank", "world", "here", "store"))
            if cores := cores_of(here):
                os.sched_setaffinity(0, cores[rank % here])
            model = Model.from_json(told["model"])
            opened, reason = open_native(model, world, rank)
            if reason is not None:
                raise ToolkitError(f"{model.path}: {reason}")
            memory = os.open(told["memory"], os.O_RDWR)
            runner = NativeRank(opened, model, Share(rank, world, memory))
            found = signature(opened, Path(model.path), times=store is None)
            pipe.send_bytes(wire.pack({"error": None, "value": found, "instructions": instructions()}))
            if store is not None:
                if rank % here == 0:
                    more = {"machine": rank // here, "own": own}
                    Bridge({name: told[name] for name in SHARED} | more, runner.lose, pipe)
                pipe.send_bytes(wire.pack({"error": None}))
        except (ToolkitError, RuntimeError, OSError) as e:
            pipe.send_bytes(wire.pack({"error": str(e)}))
        else:
            ended = _serve(pipe, runner)
    os._exit(0 if ended else 1)  # also in the midst of a step, in which nobody takes part any more


def _serve(pipe: Connection, runner: NativeRank) -> bool:
    """Whether the first rank has said that it ends, and is not just gone."""
    answers: Answers = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(pipe, runner, answers), name="answers", daemon=True).start()
    while True:
        name, arguments = wire.unpack(pipe.recv_bytes())
        if name == "close":
            return True
        answers.put(runner.submit(*arguments) if name == "submit" else called(runner, name, arguments))


def _answer(pipe: Connection, runner: NativeRank, answers: Answers) -> None:
    with suppress(OSError):  # the first rank is gone: the other thread hears of it too
        while True:
            found = answers.get()
            found = found if isinstance(found, dict) else _ended(found)
            pipe.send_bytes(wire.pack(found | {"echo": runner.lost}))


def _ended(step: StepHandle) -> dict[str, Any]:
    try:
        return {"error": None, "value": wire.digest(step.result())}
    except RunnerError as e:
        return {"error": str(e), "value": None}
