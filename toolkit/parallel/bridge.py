"""Joins the native runner's ranks of one machine to those of others: a process beside the ranks, on each machine, that
hands on what they write in each meeting (``system/bridge.h``), by gloo.

It is a process, so that a meeting never waits for Python's lock in one that also serves.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from toolkit.base import child_process
from toolkit.errors import ToolkitError
from toolkit.parallel import wire
from toolkit.parallel.group import JOIN_SECONDS
from toolkit.parallel.links import GLOO
from toolkit.parallel.ranks import GRACE_SECONDS
from toolkit.runners.native import library

SHARED = ("memory", "world", "here", "store", "seconds")
"""What bridges are told as their ranks are: the path of what ranks of a machine have in common; how many ranks there
are, and how many on each machine; [host, port] at which all meet; how long a message may take."""


class Bridge:
    """The process, seen from the first rank of its machine."""

    def __init__(self, told: dict[str, Any], lost: Callable[[], None], first: Connection | None = None) -> None:
        """``told``: what ``SHARED`` names; ``machine``, which this is; ``own``, its address. ``lost`` is called, from
        another thread, when it ends by itself. ``first``: to the first rank of all, which says nothing meanwhile.
        Waits until those of all machines have met. Raises ToolkitError, and EOFError where the first rank is gone."""
        self._why, self._closed = "", False
        mine, theirs = socket.socketpair()
        with mine, theirs:
            self._process = child_process.start("toolkit.parallel.bridge", theirs, stdout=2)
            self._pipe = Connection(mine.detach())
        with suppress(OSError):  # it is gone, which is heard below
            self._pipe.send_bytes(wire.pack(told))
        if first is not None and self._pipe not in wait([self._pipe, first]):
            self._end()
            raise EOFError
        if why := self._heard():
            self._end()
            raise ToolkitError(f"machines of ranks have not met: {why}")
        self._thread = threading.Thread(target=self._watch, args=(lost,), name="ranks-bridge", daemon=True)
        self._thread.start()

    def _heard(self) -> str:
        try:
            return str(wire.unpack(self._pipe.recv_bytes())["error"] or "")
        except (EOFError, OSError):
            return f"the bridge of ranks (process {self._process.pid}) has ended"

    def _watch(self, lost: Callable[[], None]) -> None:
        self._why = self._heard()
        if not self._closed:
            lost()

    def why(self) -> str:
        """After a rank was lost: what of the other machines it ended with, "" where nothing is wrong there."""
        self._thread.join(GRACE_SECONDS)
        return self._why

    def close(self) -> None:
        """No rank here is to be in a step."""
        self._closed = True
        self._end()
        self._thread.join()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


def main(fd: int) -> None:
    """Meet the other machines' as the first message says, then carry until the other end closes, or a rank is lost."""
    child_process.ignore(signal.SIGINT, signal.SIGTERM)
    with Connection(fd) as pipe, suppress(EOFError, OSError):
        told = wire.unpack(pipe.recv_bytes())
        threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
        try:
            span = Span(os.open(told["memory"], os.O_RDWR), told["world"], told["machine"], told["here"])
            host, port = told["store"]
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
            span.meet(dist.PrefixStore("machines", store), told["own"], told["seconds"])
        except (ToolkitError, RuntimeError, OSError) as e:
            pipe.send_bytes(wire.pack({"error": _line(e)}))
        else:
            pipe.send_bytes(wire.pack({"error": None}))
            pipe.send_bytes(wire.pack({"error": span.carry()}))
    os._exit(0)


def _end_with(pipe: Connection) -> None:
    with suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(0)


class Span:
    """What a bridge does: ``machine``'s ranks are ``here`` of ``world``, which lie one behind the other."""

    def __init__(self, memory: int, world: int, machine: int, here: int) -> None:
        """``memory``: descriptor of what the ranks here have in common, which none has joined yet."""
        self._machine, self._machines, self._memory = machine, world // here, memory
        self._library = library.load(library.library_path())
        self._bridge = self._library.tk_bridge_open(memory, world, machine * here, here)
        if not self._bridge:
            raise RuntimeError(library.error(self._library))
        self._group: Any = None

    def meet(self, store: Any, host: str, seconds: float) -> None:
        """Wait for the bridges of the other machines. Raises RuntimeError where they do not come."""
        self._group = GLOO.open(store, host, self._machine, self._machines, seconds)

    def carry(self) -> str:
        """Until a rank is lost, here ("") or elsewhere (why); those here are told."""
        try:
            self._carry()
            return ""
        except RuntimeError as e:
            return _line(e)
        finally:
            self.lose()
            self._group.abort()  # the others' messages fail at once

    def _carry(self) -> None:
        others = [machine for machine in range(self._machines) if machine != self._machine]
        most = self._wait()
        out, found = _bytes(most), {machine: _bytes(most) for machine in others}
        coming: dict[int, Any] = {}
        while most:
            if most > len(out):
                raise RuntimeError(f"a message between ranks has {most} bytes at most, before it had {len(out)}")
            for machine in others:
                if machine not in coming:
                    with _of(machine):
                        coming[machine] = self._group.recv([found[machine]], machine, 0)
            mine = out[: self._library.tk_bridge_pack(self._bridge, out.data_ptr())]
            sent = []
            for machine in others:
                with _of(machine):
                    sent.append(self._group.send([mine], machine, 0))
            for machine in others:
                with _of(machine):
                    coming.pop(machine).wait()
                    if self._library.tk_bridge_unpack(self._bridge, found[machine].data_ptr()):
                        raise RuntimeError(library.error(self._library))
            self._library.tk_bridge_arrive(self._bridge)
            for machine in others:  # a message that comes when it is waited for needs no answer first
                with _of(machine):
                    coming[machine] = self._group.recv([found[machine]], machine, 0)
            for machine, work in zip(others, sent, strict=True):
                with _of(machine):
                    work.wait()
            most = self._wait()

    def _wait(self) -> int:
        most = int(self._library.tk_bridge_wait(self._bridge))
        if most < 0:
            raise RuntimeError(library.error(self._library))
        return most

    def lose(self) -> None:
        """No rank of this machine waits any more."""
        self._library.tk_bridge_lose(self._bridge)


@contextmanager
def _of(machine: int) -> Iterator[None]:
    """What fails in here is told as that machine's: where a connection is lost, also a call that only begins fails."""
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(f"node_rank {machine}: {_line(e)}") from e


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
