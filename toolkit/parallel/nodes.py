"""Ranks on several machines: the first machine waits at an address until the others' ranks have come to it.

Whoever comes proves by a challenge that it knows the key; the key itself is never sent. What ranks say afterwards is
neither signed nor hidden: the network between the machines is to be their own.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import field
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.artifacts.alike import fingerprint
from toolkit.base import child_process
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import plain
from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel import wire
from toolkit.parallel.layout import WORLD_SIZE, Layout, launched, number_of

log = logging.getLogger(__name__)
KEY = "TOOLKIT_RANKS_KEY"
STEP_SECONDS = number_of(
    "TOOLKIT_RANKS_TIMEOUT", 120
)  # that a rank may take in a step: longer than any part of one takes
COME_SECONDS = 300.0  # in which all ranks must have come, and in which another machine looks for the first
LOOK_SECONDS = 5.0  # in which one look for the first ends
WORKERS = ("toolkit.parallel.worker", "toolkit.parallel.native_worker")  # what ranks run


@dataclass(frozen=True)
class Nodes:
    """``count`` machines, of which this is ``rank``; the first waits at ``host``:``port``. ``launched``: they are
    processes that torchrun or Ray has started, a rank each, ``launched`` of them on this machine. ``store``: at the
    address is torchrun's own store, in which the first says where it waits. ``secret``: Ray has brought it to all."""

    count: int
    rank: int
    host: str
    port: int
    launched: int = 0
    store: bool = False
    secret: bytes = field(default=b"", repr=False)

    @staticmethod
    def of(count: int, rank: int, address: str | None, layout: Layout) -> Nodes | None:
        """What the options say, or torchrun's variables; None for one machine. Raises UsageError where they do not go
        together."""
        if count == 1 and address is None and launched() > 1:
            return Nodes._launched(layout)
        if count == 1:
            return None
        if not 0 <= rank < count:
            raise UsageError(f"node_rank: found {rank}, expected 0 to {count - 1} with nnodes={count}")
        address = address or _master()
        host, _, port = (address or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(
                f"dist_init_addr: found {address or 'nothing'}, expected HOST:PORT of the first machine, "
                f"the same on all, with nnodes={count} (or master_addr and master_port, or MASTER_ADDR and MASTER_PORT)"
            )
        return Nodes(count, rank, host.strip("[]"), int(port))

    @staticmethod
    def _launched(layout: Layout) -> Nodes:
        """By the variables that torchrun sets."""
        world, rank = number_of(WORLD_SIZE, 1), number_of("RANK", -1)
        host, _, port = (_master() or "").rpartition(":")
        if world != layout.world:
            raise UsageError(
                f"{WORLD_SIZE}={world} (torchrun): {layout} has {layout.world} ranks; start as many processes, "
                f"or unset {WORLD_SIZE}"
            )
        if not 0 <= rank < world or not host or not port.isdecimal():
            found = f"RANK={os.environ.get('RANK')}, MASTER_ADDR={host or None}, MASTER_PORT={port or None}"
            raise UsageError(f"{WORLD_SIZE}={world} (torchrun): found {found}; expected all that torchrun sets")
        store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        return Nodes(world, rank, host.strip("[]"), int(port), number_of("LOCAL_WORLD_SIZE", 1), store)

    def ranks(self, world: int) -> range:
        """Those of this machine. Raises UsageError where they do not divide."""
        if world % self.count:
            raise UsageError(f"nnodes={self.count}: {world} ranks (tp × pp × dp); expected a multiple of {self.count}")
        each = world // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def here(self, world: int) -> int:
        """How many ranks share this machine."""
        return self.launched or len(self.ranks(world))

    def owner(self, rank: int, world: int) -> int:
        return rank // (world // self.count)

    def named(self, ranks: list[int], world: int) -> str:
        """Ranks, with the machines that they are on."""
        each = (f"{rank}" if self.launched else f"{rank} (node_rank {self.owner(rank, world)})" for rank in ranks)
        return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(each)}"

    @property
    def how(self) -> str:
        """How others are started."""
        if self.secret:
            return "by Ray"
        return "by torchrun" if self.launched else "with its --node-rank"

    @property
    def key(self) -> bytes:
        """What all know. Raises UsageError where it is not set."""
        return self.secret or key()

    def board(self, seconds: float) -> Any:
        """torchrun's store. Raises OSError where nobody is there."""
        import torch.distributed as dist

        try:
            return dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=seconds))
        except (RuntimeError, ValueError) as e:
            raise OSError(str(e).partition("\n")[0]) from e

    def address(self) -> tuple[str, int]:
        """Where the first waits. Raises OSError where that is not known yet."""
        if not self.store:
            return self.host, self.port
        board = self.board(LOOK_SECONDS)
        if not board.check([entry_of_door()]):
            raise OSError("rank 0 has not come")
        return self.host, int(board.get(entry_of_door()))


def entry_of_door() -> str:
    """Where in torchrun's store the first says where it waits; processes that torchrun starts anew have another."""
    return f"toolkit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _master() -> str | None:
    found = os.environ.get("MASTER_ADDR")
    return None if found is None else f"{found}:{os.environ.get('MASTER_PORT', '')}"


def key() -> bytes:
    """What all machines know. Raises UsageError where it is not set."""
    found = os.environ.get(KEY, "")
    if not found:
        raise UsageError(f"{KEY}: not set; with nnodes above 1 or torchrun it is to be the same secret everywhere")
    return found.encode()


def limit(end: socket.socket | Connection, seconds: float) -> None:
    """Have what is sent and read there take no longer than that, 0: as long as it takes."""
    sock = socket.socket(fileno=os.dup(end.fileno()))
    with sock:
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", int(seconds), 0))
        if sock.family == socket.AF_UNIX:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        every = max(1, STEP_SECONDS // 6)  # a link that is cut is noticed also where nothing is to be sent
        tcp = (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, every),
            (socket.TCP_KEEPINTVL, every),
            (socket.TCP_KEEPCNT, 5),
        )
        for name, value in (*tcp, (socket.TCP_USER_TIMEOUT, 1000 * STEP_SECONDS)):
            sock.setsockopt(socket.IPPROTO_TCP, name, value)


def about(path: Path, model: Any, layout: Layout) -> dict[str, Any]:
    """What machines must have alike; ``model``: what is opened, and how, as a ``toolkit.parallel.model.Model``."""
    told = model.to_json() | {"path": "", "devices": [], "family_files": len(model.family_files)}
    told["options"] |= {"threads": 0}
    options = json.loads(json.dumps([told, plain(layout)]))
    return {"version": __version__, "model": fingerprint(path), "options": options}


# -- the other machines


def serve(model: Any, layout: Layout, nodes: Nodes, told: Callable[[str], None]) -> None:
    """Run the ranks of this machine for the first one, as often as it starts them, until it has ended. Raises
    ToolkitError where it turns them away, or is not there."""
    own = about(Path(model.path), model, layout) | {"path": model.path, "devices": list(model.devices)}
    ranks = nodes.ranks(layout.world)
    who = f"ranks {ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else f"rank {ranks.start}"
    while True:
        told(f"{who}: looking for {nodes.host}:{nodes.port}")
        started: list[subprocess.Popen[bytes]] = []
        memory = os.memfd_create("toolkit-ranks")  # new at each start; ranks that speak by messages leave it empty
        own["memory"] = f"/proc/{os.getpid()}/fd/{memory}"
        try:
            started += [_start(nodes, own | {"rank": rank}) for rank in ranks]
            told(f"{who} at work for {nodes.host}:{nodes.port}")
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
            os.close(memory)
        if not any(codes):
            return told(f"{who}: {nodes.host}:{nodes.port} has ended")


def _start(nodes: Nodes, hello: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The process of one rank of this machine, once the first has come and taken it. One that hangs up before it has
    answered may just have ended and be started anew: it is looked for again."""
    until, why = time.monotonic() + COME_SECONDS, ""
    while time.monotonic() < until:
        try:
            sock, worker = _taken(nodes, hello)
        except (OSError, EOFError) as e:
            why = str(e) or "it has hung up"
            time.sleep(0.5)
        else:
            with sock:
                return child_process.start(worker, sock, stdout=sys.stderr)
    first = "start it too" if nodes.launched else "start the command there with --node-rank 0"
    raise ToolkitError(f"nobody is at {nodes.host}:{nodes.port} ({why}); {first}")


def _taken(nodes: Nodes, hello: dict[str, Any]) -> tuple[socket.socket, str]:
    """The way to the first machine, and what it has a rank run. Raises ToolkitError where it turns it away or has
    another key, OSError and EOFError where it is not there or hangs up."""
    at = f"{nodes.host}:{nodes.port}"
    sock = socket.create_connection(nodes.address(), timeout=LOOK_SECONDS)
    try:
        sock.settimeout(None)
        limit(sock, COME_SECONDS)
        with Connection(os.dup(sock.fileno())) as pipe:
            answer_challenge(pipe, nodes.key)
            deliver_challenge(pipe, nodes.key)
            pipe.send_bytes(wire.pack(hello))
            answer: dict[str, Any] = wire.unpack(pipe.recv_bytes(1 << 20))
        if answer["error"] is not None:
            raise ToolkitError(f"{at} turned rank {hello['rank']} away: {answer['error']}")
        limit(sock, 0)  # the first step may be long in coming
        assert answer["worker"] in WORKERS
        return sock, answer["worker"]
    except BaseException as e:
        sock.close()
        if isinstance(e, AuthenticationError):
            raise ToolkitError(f"{KEY}: {at} has another; it is to be the same on all") from None
        raise
