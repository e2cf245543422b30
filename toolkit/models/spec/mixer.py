"""What every mixer answers for itself. Executors keep a table by ``kind``; all else asks these questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec.keeps import Kept
from toolkit.models.spec.parts import LinearSpec, NormSpec, RopeSpec
from toolkit.models.spec.share import Share, Unit

if TYPE_CHECKING:
    from toolkit.models.spec.mlp import MlpSpec


@dataclass(frozen=True)
class Rotary:
    """Of each ``period`` rows of a parameter those from ``start`` on, ``count`` of them, turn with the position."""

    period: int
    start: int
    count: int


class MixerSpec:
    """The questions, with the answers of a mixer that has nothing of the kind.

    ``group``: of one that keeps something, the index of its cache group in ``DecoderSpec.cache_groups``.
    """

    group: int = 0

    def linears(self) -> tuple[LinearSpec, ...]:
        """All, routers included, in execution order."""
        raise NotImplementedError

    def readers(self) -> tuple[LinearSpec, ...]:
        """Those that read the sublayer's input, routers apart."""
        raise NotImplementedError

    def inputs(self) -> tuple[tuple[LinearSpec, ...], ...]:
        """Linears that read the same numbers, routers included, together."""
        return ((*self.readers(), *self.routers()),)

    def input_name(self) -> str:
        """What the sublayer's input is called where inputs are observed."""
        return self.readers()[0].name

    def width(self, hidden: int) -> int:
        """Numbers of a token that its computation holds at once, at most."""
        raise NotImplementedError

    def check(self, hidden: int) -> None:
        """Raise ValueError, one line, where its numbers are impossible or contradict one another."""
        raise NotImplementedError

    def adaptable(self) -> tuple[LinearSpec, ...]:
        """Those that LoRA adapters may change."""
        return self.linears()

    def matrices(self) -> tuple[LinearSpec, ...]:
        """Those that runners hold as floating point matrices, whatever form they are stored in."""
        return ()

    def routers(self) -> tuple[LinearSpec, ...]:
        """What chooses and weighs experts, or says how a state fades: a number each, which no method quantizes."""
        return ()

    def mlps(self) -> tuple[MlpSpec, ...]:
        """The MLPs inside."""
        return ()

    def norms(self) -> tuple[NormSpec, ...]:
        """Those inside, in execution order."""
        return ()

    def vectors(self) -> dict[str, int]:
        """Parameters that are neither linear nor norm: name → numbers in it."""
        return {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of ``vectors`` that checkpoints store in several dimensions: name → shape."""
        return {}

    def common(self) -> dict[str, tuple[int, ...]]:
        """Vectors that all layers share, which ``vectors`` has not: name → shape, as checkpoints store them."""
        return {}

    def ropes(self) -> tuple[RopeSpec, ...]:
        """Its rotary embeddings."""
        return ()

    def rotary(self) -> dict[str, Rotary]:
        """Linears and norms whose rows turn with the position."""
        return {}

    def unshared(self, world: int, unit: Unit) -> str | None:
        """Why it cannot be shared out among so many ranks, or None."""
        return f"layers of kind {getattr(self, 'kind', '')} are not split yet"

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """What one of the ranks computes, where ``unshared`` has no word against it. What all of them give is added."""
        raise NotImplementedError

    def keeps(self) -> Kept | None:
        """What it keeps of a request between steps."""
        return None
