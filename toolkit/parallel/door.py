"""Where the first of several machines waits for the others' ranks, and how they prove who they are."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from typing import Any

from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel import nodes as machines
from toolkit.parallel import wire
from toolkit.parallel.nodes import LOOK_SECONDS, WORKERS, Nodes, entry_of_door, limit

log = logging.getLogger(__name__)
ASK_SECONDS = 1.0  # after which whoever started the others is asked whether one has failed
GREET_SECONDS = 10.0  # that one who has come may take to prove that it knows the key
GREET_AT_ONCE, SOON_SECONDS = 64, 0.05  # who may do so at once; how soon it is seen that no more are wanted
Met = tuple[Connection, dict[str, Any]]  # a rank, and what it says of itself
Greeted = SimpleQueue[tuple[str, Met]]  # with the address that it comes from


class Door:
    """Where the first machine waits."""

    def __init__(self, nodes: Nodes, worker: str = WORKERS[0]) -> None:
        """``worker``: what ranks of other machines are to run. Raises UsageError for an address that cannot be had."""
        self._key, self._nodes, self._worker = nodes.key, nodes, worker
        try:
            port = 0 if nodes.store else nodes.port
            found = socket.getaddrinfo(nodes.host, port, type=socket.SOCK_STREAM)
            family, *_, own = min(found, key=lambda one: one[0] != socket.AF_INET)  # which all others have, too
            self._socket = socket.create_server(own, family=family, backlog=64, reuse_port=False)
        except (OSError, UnicodeError) as e:  # the latter of a name with two dots in a row
            why = str(getattr(e, "strerror", None) or e).partition(" (while")[0]  # Python adds the address
            what = "a free port here" if getattr(e, "errno", 0) == errno.EADDRINUSE else "an address of this machine"
            raise UsageError(f"dist_init_addr: {nodes.host}:{nodes.port}: {why}; expected {what}") from e
        if nodes.store:
            try:
                nodes.board(LOOK_SECONDS).set(entry_of_door(), str(self._socket.getsockname()[1]))
            except OSError as e:
                self._socket.close()
                raise ToolkitError(f"torchrun's store at {nodes.host}:{nodes.port}: {e}") from e

    def collect(self, world: int, own: dict[str, Any], failed: Callable[[], str] | None = None) -> dict[int, Met]:
        """The connections of all ranks of other machines, and what they say of themselves, which is held against
        ``own``. ``failed``: why one will not come, "" where all may. Raises ToolkitError that names those who have not
        come, or who are not alike."""
        wanted = {rank for rank in range(world) if self._nodes.owner(rank, world) != 0}
        with self._open() as greeted:
            return self._collected(greeted, wanted, world, own, failed or (lambda: ""))

    def _collected(
        self, greeted: Greeted, wanted: set[int], world: int, own: dict[str, Any], failed: Callable[[], str]
    ) -> dict[int, Met]:
        """``collect``, of those who come out of ``greeted``."""
        found: dict[int, Met] = {}
        until = time.monotonic() + machines.COME_SECONDS
        while missing := sorted(wanted - set(found)):
            left = until - time.monotonic()
            try:
                if left <= 0:  # also where strangers come one after the other
                    raise Empty
                host, met = greeted.get(timeout=min(left, ASK_SECONDS))
            except Empty:
                if why := failed():
                    raise ToolkitError(why) from None
                if time.monotonic() < until:
                    continue
                who, at = self._nodes.named(missing, world), f"{self._nodes.host}:{self._nodes.port}"
                raise ToolkitError(
                    f"{who}: not come to {at} within {machines.COME_SECONDS:g} s; start the command there, "
                    f"{self._nodes.how}"
                ) from None
            pipe, hello = met
            if (why := _unlike(own, hello)) or hello["rank"] not in missing:
                why = why or f"rank {hello['rank']} is not missing"
                pipe.send_bytes(wire.pack({"error": why}))
                pipe.close()
                raise ToolkitError(f"rank {hello['rank']} at {host}: {why}")
            pipe.send_bytes(wire.pack({"error": None, "worker": self._worker}))
            found[hello["rank"]] = pipe, hello | {"host": host}
        return found

    @contextmanager
    def _open(self) -> Iterator[Greeted]:
        """Those who come and know the key, while the block lasts. Each is greeted by a thread of its own: others need
        not wait for one who says nothing."""
        greeted: Greeted = SimpleQueue()
        ends, places = threading.Event(), threading.Semaphore(GREET_AT_ONCE)

        def meet(sock: socket.socket, host: str) -> None:
            try:
                met = self._greet(sock)
            except (AuthenticationError, OSError, EOFError, ValueError, KeyError) as e:
                log.warning("ranks: somebody at %s was turned away: %s", host, e or type(e).__name__)
            else:
                greeted.put((host, met))
            finally:
                places.release()

        def wait() -> None:
            while not ends.is_set():
                if places.acquire(timeout=SOON_SECONDS):
                    try:
                        sock, peer = self._socket.accept()
                        threading.Thread(target=meet, args=(sock, peer[0]), daemon=True).start()
                    except (OSError, RuntimeError) as e:
                        places.release()
                        if not isinstance(e, TimeoutError):  # the system has no file or thread for one more
                            ends.wait(SOON_SECONDS)

        self._socket.settimeout(SOON_SECONDS)
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        try:
            yield greeted
        finally:
            ends.set()
            waiting.join()

    def _greet(self, sock: socket.socket) -> Met:
        sock.settimeout(None)
        limit(sock, GREET_SECONDS)
        pipe = Connection(os.dup(sock.fileno()))
        late = threading.Timer(GREET_SECONDS, _hang_up, [sock])  # for one whose bytes come one by one
        late.start()
        try:
            deliver_challenge(pipe, self._key)
            answer_challenge(pipe, self._key)
            hello: dict[str, Any] = wire.unpack(pipe.recv_bytes(1 << 20))
        except BaseException:
            pipe.close()
            raise
        finally:
            late.cancel()
            sock.close()
        return pipe, hello

    def close(self) -> None:
        self._socket.close()


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):  # it has gone by itself
        sock.shutdown(socket.SHUT_RDWR)


def _unlike(own: dict[str, Any], hello: dict[str, Any]) -> str:
    """How a rank differs from the first machine, "" where it does not."""
    for name, what in (
        ("version", "another version of the toolkit"),
        ("model", "another model"),
        ("options", "other options"),
    ):
        if own[name] != hello[name]:
            told = f": {hello[name]}, here {own[name]}" if name == "version" else ""
            if name == "options":
                told = "".join(f" ({x})" for x in islice(_differences(own[name], hello[name], ""), 3))
            return f"it has {what}{told}; all machines need the same"
    return ""


def _differences(own: Any, other: Any, name: str) -> Iterator[str]:
    """What differs between two plain values, by the names that lead there."""
    if isinstance(own, dict) and isinstance(other, dict):
        for key in [*own, *(other.keys() - own.keys())]:
            yield from _differences(own.get(key), other.get(key), key)
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        for one, two in zip(own, other, strict=True):
            yield from _differences(one, two, name)
    elif own != other:
        yield f"{name}: {other!r:.60}, here {own!r:.60}"
