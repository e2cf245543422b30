"""Where a rank stands: its stage of the layers, its copy of them, its part of what is split in every layer."""

from __future__ import annotations

import os

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError

WORLD_SIZE = "WORLD_SIZE"  # torchrun's


@dataclass(frozen=True)
class Layout:
    """``tp`` ranks share each layer, ``pp`` stages have some layers each, one behind the other, and each request is one
    of ``dp`` copies' of all that. ``ep``: over how many ranks whole experts are shared out, 1: each is split by ``tp``;
    ``eplb``: by how often they are chosen. Ranks are counted stage by stage, in those copy by copy."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    eplb: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def stage(self, rank: int) -> int:
        return rank // (self.tp * self.dp)

    def copy(self, rank: int) -> int:
        return rank // self.tp % self.dp

    def part(self, rank: int) -> int:
        return rank % self.tp

    def seat(self, rank: int) -> int:
        """Among the ranks that experts are shared out over."""
        return rank % (self.tp * self.dp)

    def first(self, rank: int) -> int:
        """The first of the ranks that share this one's layers."""
        return rank - self.part(rank)

    def check(self) -> None:
        """Raise UsageError where the numbers do not go together."""
        if self.ep not in (1, self.tp * self.dp):
            whole = f"{self.tp * self.dp}, tp × dp, or 1" if self.tp * self.dp > 1 else "1, or a larger tp or dp"
            raise UsageError(f"ep={self.ep}: experts are shared out over all ranks of a stage; expected {whole}")
        if self.eplb and self.ep == 1:
            raise UsageError("enable_eplb: expected whole experts on ranks, found ep=1; give ep, or leave it out")

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep))
        return ", ".join(f"{name}={size}" for name, size in sizes if size > 1) or "tp=1"


def launched() -> int:
    """How many processes torchrun has started, 1: none but this."""
    return number_of(WORLD_SIZE, 1)


def number_of(name: str, default: int) -> int:
    """What an environment variable says, ``default`` where it is no number."""
    found = os.environ.get(name, "")
    return int(found) if found.isdecimal() else default
