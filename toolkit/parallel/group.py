"""Ranks that add up and gather, over torch.distributed's gloo on this machine."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.parallel.part import Part

JOIN_SECONDS = 120.0  # in which all ranks must have come
HOST = "127.0.0.1"


class Group:
    """Rank ``rank`` of ``world``; implements ``toolkit.runners.tensor.split.Split``. There may be several in a process.

    ``sums``, ``gathers``: messages so far. ``broken``: what went wrong in one of them, after which none goes through.
    """

    def __init__(self, rank: int, world: int, part: Part) -> None:
        self.rank, self.world, self.embedding = rank, world, part.embedding
        self.sums = self.gathers = 0
        self.broken = ""
        self._sizes = part.head
        self._ranks: Any = None  # a ProcessGroupGloo, of which torch's stubs know no methods

    @property
    def messages(self) -> int:
        return self.sums + self.gathers

    def join(self, folder: Path, seconds: float) -> None:
        """Meet the others, who come to the same ``folder``. ``seconds``: that one message may take. Raises RuntimeError
        where not all of them come."""
        store = dist.FileStore(str(folder / "ranks"), self.world)
        store.set_timeout(timedelta(seconds=JOIN_SECONDS))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=seconds)
        self._ranks = gloo(store, self.rank, self.world, options)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place where ``x`` is contiguous."""
        assert self._ranks is not None, "join comes first"
        self.sums += 1
        whole = x.contiguous()
        try:
            self._ranks.allreduce([whole]).wait()
        except RuntimeError as error:
            self.broken = str(error)
            raise
        return whole

    def head(self, x: Tensor) -> Tensor:
        """[rows, tokens of this rank] -> [rows, tokens of all ranks in their order]."""
        assert self._ranks is not None, "join comes first"
        self.gathers += 1
        most = max(self._sizes)
        mine = torch.nn.functional.pad(x, (0, most - x.shape[1])).contiguous()
        found = [torch.empty_like(mine) for _ in range(self.world)]
        try:
            self._ranks.allgather([found], [mine]).wait()
        except RuntimeError as error:
            self.broken = str(error)
            raise
        return torch.cat([part[:, :size] for part, size in zip(found, self._sizes, strict=True)], 1)

    def leave(self) -> None:
        """No message goes through any more."""
        if self._ranks is not None:
            self._ranks.abort()
            self._ranks = None
