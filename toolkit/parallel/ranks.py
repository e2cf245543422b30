"""The other ranks' processes, seen from the first: started, told what to do, watched, ended."""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from toolkit.base import child_process
from toolkit.base.threads import usable_cores
from toolkit.errors import ToolkitError
from toolkit.parallel import wire
from toolkit.parallel.door import Door
from toolkit.parallel.nodes import STEP_SECONDS, WORKERS, Nodes, limit

OPEN_SECONDS = 300.0  # that a rank may take to start and to open the model
LOAD_SECONDS = 3600.0  # … and to load its part
GRACE_SECONDS = 3.0  # in which ranks beside one that is lost end or say why
MEETING_BYTES = 8192  # that ranks write where they meet, with room to spare


def crowded(count: int) -> list[str]:
    """What is to be said of so many ranks on this machine."""
    cores = usable_cores()
    few = f"{count} ranks are more than the {cores} cores here: they wait for each other"
    return [few] if count > cores else []


class RankLost(Exception):
    """A rank does not answer, or not as the others do."""


class Ranks:
    """Processes of ranks 1 … world - 1: those of this machine, which end when this one does, and of ``nodes``, where
    there are more, those who come from there."""

    def __init__(
        self,
        world: int,
        threads: int,
        worker: str = WORKERS[0],
        nodes: Nodes | None = None,
        own: dict[str, Any] | None = None,
        failed: Callable[[], str] | None = None,
    ) -> None:
        """``threads``: of each; ``worker``: the module whose ``main`` they run. ``own``: what ranks of other machines
        must have alike; ``failed``: why one of these will not come, "" where all may. Raises ToolkitError where the
        system has no file, process or memory for them, or where some do not come."""
        self._hosts: dict[int, dict[str, Any]] = {}  # by rank: what those of other machines say
        self._folder: Path | None = None
        door = None if nodes is None else Door(nodes, worker)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
        try:
            for _ in range(1, world) if nodes is None else nodes.ranks(world)[1:]:
                mine, theirs = socket.socketpair()
                limit(mine, STEP_SECONDS)  # one that stands still is no reason to wait
                with mine, theirs:
                    started = child_process.start(worker, theirs, stdout=2, env=env)
                    self._processes.append(started)
                    self._pipes.append(Connection(mine.detach()))
            if door is not None:
                for _, (pipe, hello) in sorted(door.collect(world, own or {}, failed).items()):
                    self._hosts[hello["rank"]] = hello
                    self._pipes.append(pipe)
                    limit(pipe, STEP_SECONDS)
        except OSError as e:
            self.end()
            raise ToolkitError(f"a rank's process cannot be started: {e}") from e
        except BaseException:
            self.end()
            raise
        finally:
            if door is not None:
                door.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def ends(self) -> list[int]:
        """Descriptors of the connections to them, which hang up when they are gone."""
        return [pipe.fileno() for pipe in self._pipes]

    def open(self, model: dict[str, Any], dense: bool, **more: Any) -> None:
        """Tell all what they are, and ``more``. Each answers twice: when it has opened the model, and when it has met
        the others; where they do not meet by messages, once."""
        level, world = logging.getLogger("toolkit").getEffectiveLevel(), len(self._pipes) + 1
        for rank, pipe in enumerate(self._pipes, 1):
            told = {"rank": rank, "world": world, "model": model, "dense": dense, "log_level": level}
            told |= {"seconds": STEP_SECONDS, **more}
            if rank in self._hosts:
                host = self._hosts[rank]
                told |= {"model": model | {name: host[name] for name in ("path", "devices")}, "memory": host["memory"]}
            self._put(rank, pipe, wire.pack(told))

    def meeting_place(self) -> Path:
        """A new folder, which those that are told of it remove where this process is killed. Raises ToolkitError."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="toolkit-ranks-"))
            (self._folder / "room").write_bytes(bytes(MEETING_BYTES))  # on a full disk torch may tell anything
        except OSError as e:
            where = tempfile.gettempdir()
            raise ToolkitError(f"ranks meet in a folder of {where} (TMPDIR), where none can be: {e.strerror}") from e
        return self._folder

    def have_met(self) -> None:
        """Where they met is not needed any more."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def tell(self, name: str, *arguments: Any, own: Sequence[Any] = ()) -> None:
        """Have all call the runner's method ``name``; ``own``: of each, a last argument. Raises RankLost where one is
        gone."""
        data = b"" if own else wire.pack([name, list(arguments)])
        for rank, pipe in enumerate(self._pipes, 1):
            self._put(rank, pipe, wire.pack([name, [*arguments, own[rank - 1]]]) if own else data)

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """Of all ranks, in their order. Raises RankLost, which names the rank that is gone or takes longer."""
        until = time.monotonic() + seconds
        return [self._answer(rank, pipe, until, seconds) for rank, pipe in enumerate(self._pipes, 1)]

    def gone(self) -> str:
        """Which have ended or, on other machines, hung up; "" where all are there."""
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe, select.POLLRDHUP)
        ended = {end for end, _ in poll.poll(0)}
        return "; ".join(self._ended(rank) for rank, pipe in enumerate(self._pipes, 1) if pipe.fileno() in ended)

    def why_lost(self) -> str:
        """After a message between ranks has failed: which one it was, as far as that can be told."""
        until, found = time.monotonic() + GRACE_SECONDS, []
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                answer = self._answer(rank, pipe, until, STEP_SECONDS)
            except RankLost as e:
                found.append(str(e))
            else:
                found += [f"rank {rank}: {answer['error']}"] if answer["error"] and not answer["echo"] else []
        return "; ".join(found) or "the ranks have lost each other"

    def close(self) -> None:
        """As ``end``; those of other machines, which would look for another start, are told that there is none."""
        for rank, pipe in enumerate(self._pipes, 1):
            if rank in self._hosts:
                with suppress(RankLost):
                    self._put(rank, pipe, wire.pack(["close", []]))
        self.end()

    def end(self) -> None:
        """End all at once, wherever they are."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self.have_met()

    def _put(self, rank: int, pipe: Connection, data: bytes) -> None:
        try:
            pipe.send_bytes(data)
        except OSError:
            raise RankLost(self._ended(rank)) from None

    def _answer(self, rank: int, pipe: Connection, until: float, seconds: float) -> dict[str, Any]:
        try:
            if not pipe.poll(max(0.0, until - time.monotonic())):
                raise RankLost(f"rank {rank} ({self._where(rank)}) has not answered for {seconds:g} s")
            found: dict[str, Any] = wire.unpack(pipe.recv_bytes())
        except (EOFError, OSError):
            raise RankLost(self._ended(rank)) from None
        return found

    def _where(self, rank: int) -> str:
        return f"at {self._hosts[rank]['host']}" if rank in self._hosts else f"process {self._processes[rank - 1].pid}"

    def _ended(self, rank: int) -> str:
        if rank in self._hosts:
            return f"rank {rank} ({self._where(rank)}) is gone"
        process = self._processes[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        code = process.returncode
        how = (
            "takes no messages" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended ({code})"
        )
        return f"rank {rank} (process {process.pid}) {how}"
