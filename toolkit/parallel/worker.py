"""The process of every rank but the first; ``ranks.py`` is its other end.

``child_process.start("toolkit.parallel.worker", SOCKET)`` does what the first rank says until that closes. It holds no
state of requests: only its part of the weights and of the cache.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from toolkit.base import child_process
from toolkit.base.record import read
from toolkit.errors import ToolkitError
from toolkit.parallel import wire
from toolkit.parallel.devices import kind_of_ranks, own_device, place_of
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model, RankRunner, open_whole
from toolkit.parallel.watch import BACK_SECONDS, Watch
from toolkit.runners.base import RunnerError
from toolkit.runners.step import StepOutput

log = logging.getLogger(__name__)
BEHIND_SECONDS = BACK_SECONDS + 5  # in which a rank that is left alone ends by itself, with what there is to say


def main(fd: int) -> None:
    """Open what the first message says, then run steps until the other end closes."""
    child_process.ignore(signal.SIGINT, signal.SIGTERM)
    ended, told = False, {}
    if address(fd):
        child_process.end_with_parent()  # the first rank, far away, would not notice
    with Connection(fd) as pipe, until_it_is_gone():
        told = first_message(pipe)
        try:
            model = Model.from_json(told["model"])
            layout = read(Layout, told["layout"])
            place = place_of(told["rank"], told["here"], told["launched"])
            device = own_device(kind_of_ranks(model.options.device), model.devices, place)
            own = replace(model.options, device=device)
            whole = open_whole(model, layout)
            runner = RankRunner(whole, told["rank"], layout, own, told["dense"], told["here"])
            pipe.send_bytes(wire.pack({"error": None}))
            if told["folder"] is not None:
                runner.group.join(Path(told["folder"]), told["seconds"])
            else:
                host, port = told["store"]
                runner.group.join_at(host, port, address(fd) or host, told["seconds"])
            if runner.group.link.queued:
                Watch(runner.group, [pipe.fileno()], told["seconds"])
            pipe.send_bytes(wire.pack({"error": None}))
        except (ToolkitError, RuntimeError, OSError) as e:
            pipe.send_bytes(wire.pack({"error": str(e)}))
        else:
            ended = _serve(pipe, runner)
    if told.get("folder") is not None:
        shutil.rmtree(told["folder"], ignore_errors=True)
    os._exit(0 if ended else 1)  # what is left of a broken group would end this with an abort


@contextmanager
def until_it_is_gone() -> Iterator[None]:
    """What is done for the first rank, which may go without a word, or behind a link that fails."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except OSError as e:
        log.warning("the first rank is lost: %s", e)


def first_message(pipe: Connection) -> dict[str, Any]:
    """What the first rank says; then the log has this one's number, and it ends soon after the first."""
    told: dict[str, Any] = wire.unpack(pipe.recv_bytes())
    _end_behind(pipe.fileno(), told.get("folder"))
    line = f"%(asctime)s %(levelname)s rank {told['rank']}: %(message)s"
    logging.basicConfig(level=told["log_level"], format=line)
    return told


def _end_behind(fd: int, folder: str | None) -> None:
    """Have this process end soon after the first rank has hung up at ``fd``, whatever it waits for or computes;
    ``folder``, where ranks were to meet, goes at once."""

    def wait() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)
        poll.poll()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(BEHIND_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, name="ranks-end", daemon=True).start()


def address(fd: int) -> str:
    """Of this machine, as its connection to the first one has it; "" where it is the first."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        return "" if sock.family == socket.AF_UNIX else str(sock.getsockname()[0])


def _serve(pipe: Connection, runner: RankRunner) -> bool:
    """Whether the first rank has said that it ends, and is not just gone."""
    group = runner.group
    while True:
        name, arguments = wire.unpack(pipe.recv_bytes())
        if name == "close":
            return True
        before = group.messages
        answer = called(runner, name, arguments)
        answer["echo"] = bool(group.broken)  # it has failed because another one has
        pipe.send_bytes(wire.pack(answer))
        if name == "step" and answer["error"] is not None and group.messages > before:
            return False  # in the midst of a step that others go on with: they shall not wait


def called(runner: Any, name: str, arguments: list[Any]) -> dict[str, Any]:
    """What the first rank is answered that has called a method."""
    try:
        found = getattr(runner, name)(*arguments)
    except (RunnerError, ToolkitError, MemoryError) as e:
        return {"error": str(e) or type(e).__name__, "value": None}
    except Exception as e:
        log.exception("%s failed", name)
        return {"error": f"{type(e).__name__}: {e}", "value": None}
    found = bytes(found) if isinstance(found, memoryview) else found
    return {"error": None, "value": found if isinstance(found, (int, bytes, list, StepOutput)) else None}
