"""Ranks that add up and gather, over torch.distributed: by gloo on CPUs, by NCCL on GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.parallel.balance import Held, evenly
from toolkit.parallel.layout import Layout
from toolkit.parallel.links import GLOO, link_of
from toolkit.parallel.part import Part
from toolkit.runners.tensor.devices.accelerator import Link

JOIN_SECONDS = 120.0  # in which all ranks must have come
PART_SECONDS = 5.0  # in which groups end where all is well
HOST = "127.0.0.1"
CPU = torch.device("cpu")
Event = list[Any]
"""What a rank has done: its name, from when until when in seconds of the monotonic clock, and how many bytes it has
handed over (of a step: how many tokens it had)."""


class Group:
    """Rank ``rank`` of ``layout``; implements ``toolkit.runners.tensor.split.Split``. A process may have several.

    ``sums``, ``gathers``, ``handed``, ``exchanges``: messages so far. ``broken``: what went wrong in one of
    them, after which none goes through. ``since``: when the step that runs has come to its last message so far, in
    seconds of the monotonic clock; None between steps.
    """

    def __init__(self, rank: int, layout: Layout, part: Part, here: int, device: torch.device = CPU) -> None:
        """``here``: how many ranks share this machine's memory; ``device``: where this one's rows are."""
        self.link, self.device = link_of(device.type), device
        self.since: float | None = None
        self.layout, self.rank, self.world, self.embedding = layout, rank, here, part.embedding
        self.stage = layout.stage(rank)
        self.begins, self.ends = self.stage == 0, self.stage == layout.pp - 1
        self.part, self.parts = layout.part(rank), layout.tp
        self.seat, self.seats = layout.seat(rank), layout.ep
        self.sums = self.gathers = self.handed = self.exchanges = 0
        self.broken = ""
        self.held: dict[int, Held] = {}  # by layer, where experts are not placed evenly
        self.trace: list[Event] | None = None  # where somebody wants to know of them
        self._sizes = part.head
        self._peers: Any = None  # those of the same layers; a Backend of torch's, whose stubs know no methods
        self._stages: Any = None  # those of the same part, stage by stage
        self._seats: Any = None  # those that experts are shared out over
        self._counts: Any = None  # the same, for what the host is to know
        self._sent: list[tuple[Any, Tensor]] = []  # under way

    def experts(self, layer: int, count: int) -> Held:
        """Of each seat, of ``count`` in all."""
        return self.held.get(layer) or evenly(count, self.seats)

    @property
    def counts(self) -> bool:
        return self.layout.eplb

    @property
    def messages(self) -> int:
        return self.sums + self.gathers + self.handed + self.exchanges

    def join(self, folder: Path, seconds: float) -> None:
        """Meet the others, who come to the same ``folder``. ``seconds``: that one message may take. Raises RuntimeError
        where not all of them come."""
        store = dist.FileStore(str(folder / "ranks"), self.layout.world)
        store.set_timeout(timedelta(seconds=JOIN_SECONDS))
        self.meet(store, HOST, seconds)

    def join_at(self, host: str, port: int, own: str, seconds: float) -> None:
        """As ``join``, of ranks on several machines: they meet at the store that the first one has there, and have
        addresses of their ``own``."""
        limit = timedelta(seconds=JOIN_SECONDS)
        self.meet(dist.TCPStore(host, port, is_master=False, timeout=limit), own, seconds)

    def meet(self, store: Any, host: str, seconds: float) -> None:
        """As ``join``, over a store of torch's; ``host``: this rank's address, which the others reach it by."""
        layout, part, copy = self.layout, self.part, self.layout.copy(self.rank)

        def group(name: str, rank: int, world: int, link: Link = self.link) -> Any:
            return None if world == 1 else link.open(dist.PrefixStore(name, store), host, rank, world, seconds)

        self._peers = group(f"peers {self.stage} {copy}", part, layout.tp)
        self._stages = group(f"stages {copy} {part}", self.stage, layout.pp)
        self._seats = self._counts = group(f"seats {self.stage}", self.seat, layout.ep)
        if self.link.queued:
            self._counts = group(f"counts {self.stage}", self.seat, layout.ep, GLOO)
            self._greet()

    def _greet(self) -> None:
        """A message through each group: its first one makes what it needs, which takes long, and may never end."""
        errors: list[Exception | None] = []

        def greet() -> None:
            try:
                for group, world in ((self._peers, self.parts), (self._seats, self.seats)):
                    if group is not None:
                        x = torch.ones(1, device=self.device)
                        group.allreduce([x]).wait()
                        if x.item() != world:
                            raise RuntimeError(f"{self.link.name}: a sum over {world} ranks gave {x.item():g}")
                x = torch.ones(1, device=self.device)
                if not self.begins:
                    self._stages.recv([x], self.stage - 1, 0).wait()
                if not self.ends:
                    self._stages.send([x], self.stage + 1, 0).wait()
                x.item()
                errors.append(None)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        thread.join(JOIN_SECONDS)
        if not errors:
            raise RuntimeError(f"{self.link.name}: no message came through within {JOIN_SECONDS:g} s")
        if errors[0] is not None:
            raise RuntimeError(f"{self.link.name}: {str(errors[0]).strip().partition(chr(10))[0]}") from errors[0]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks of this stage, in place where ``x`` is contiguous."""
        if self.layout.tp == 1:
            return x
        assert self._peers is not None, "join comes first"
        self.sums += 1
        whole = x.contiguous()
        self._wait("sum", whole, lambda: self._peers.allreduce([whole]))
        return whole

    def head(self, x: Tensor) -> Tensor:
        """[rows, tokens of this rank] -> [rows, tokens of all ranks of its stage in their order]."""
        if self.layout.tp == 1:
            return x
        assert self._peers is not None, "join comes first"
        self.gathers += 1
        most = max(self._sizes)
        mine = torch.nn.functional.pad(x, (0, most - x.shape[1])).contiguous()
        found = [torch.empty_like(mine) for _ in self._sizes]
        self._wait("gather", mine, lambda: self._peers.allgather([found], [mine]))
        return torch.cat([part[:, :size] for part, size in zip(found, self._sizes, strict=True)], 1)

    def exchange(self, x: Tensor, give: Tensor, take: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows of ``x``, ``give[i]`` of them to each seat in turn -> (what all seats give this one, how many each).
        Numbers are the host's."""
        if take is None:
            take = torch.empty_like(give)
            self._all_to_all(self._counts, take, give, [], [])
        counts, mine = take.tolist(), x.contiguous()
        found = mine.new_empty(sum(counts), x.shape[1])
        self._all_to_all(self._seats, found, mine, counts, give.tolist())
        return found, take

    def _all_to_all(self, group: Any, found: Tensor, mine: Tensor, take: list[int], give: list[int]) -> None:
        self.exchanges += 1
        self._wait("exchange", mine, lambda: group.alltoall_base(found, mine, take, give))

    def receive(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """What the stage before has come to, float32."""
        self.handed += 1
        found = torch.empty(shape, dtype=torch.float32, device=device)
        self._wait("receive", found, lambda: self._stages.recv([found], self.stage - 1, 0))
        return found

    def send(self, x: Tensor) -> None:
        """Hand ``x`` to the next stage; it goes on by itself."""
        self.handed += 1
        mine, begun = x.contiguous(), time.monotonic()
        try:
            while len(self._sent) >= self.layout.pp:  # no step has more parts: this one was taken
                self._sent.pop(0)[0].wait()
            self._sent.append((self._stages.send([mine], self.stage + 1, 0), mine))
        except RuntimeError as error:
            self.broken = str(error)
            raise
        self._keep("send", begun, mine)

    def _wait(self, name: str, x: Tensor, begin: Callable[[], Any]) -> None:
        begun = time.monotonic()
        try:
            begin().wait()
        except RuntimeError as error:
            self.broken = str(error)
            raise
        self._keep(name, begun, x)

    def _keep(self, name: str, begun: float, x: Tensor) -> None:
        if self.since is not None:
            self.since = time.monotonic()
        if self.trace is not None:
            self.trace.append([name, begun, time.monotonic(), x.nbytes])

    def abort(self, why: str) -> None:
        """End the messages that are under way, from another thread than theirs; none goes through any more."""
        self.broken = self.broken or why
        _end({self._peers, self._stages, self._seats, self._counts} - {None})

    def leave(self) -> None:
        """No message goes through any more."""
        self.broken = self.broken or "the ranks have parted"
        groups = {self._peers, self._stages, self._seats, self._counts} - {None}
        self._peers = self._stages = self._seats = self._counts = None
        self._sent = []
        if not self.link.queued:
            return _end(groups)
        # ending one may wait for a device that waits for a rank that is lost
        thread = threading.Thread(target=_end, args=(groups,), daemon=True)
        del groups
        thread.start()
        thread.join(PART_SECONDS)


def _end(groups: set[Any]) -> None:
    """Nobody is to hold them any more afterwards."""
    while groups:
        with suppress(RuntimeError):  # one that has been ended before
            groups.pop().abort()
