"""Attention to what a tower made of pictures, instead of to tokens. Llama 3.2 Vision (arXiv 2407.21783, section
7.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import sound
from toolkit.models.spec.mixer import MixerSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec
from toolkit.models.spec.share import Share, Unit, by, cut_linears, own_heads, unfit


@dataclass(frozen=True)
class CrossSpec(MixerSpec):
    """``o(attention(q(x), k(rows), v(rows)))``, multiplied by the tanh of the number ``gate``; the rows are those of
    the pictures that a token sees, and a token that sees none is given nothing.

    Keys and values are those of a picture, whatever stands around it: nothing of them turns with the position. So they
    are kept by picture, once for all requests, and are none of ``DecoderSpec.cache_groups``.
    """

    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    o: LinearSpec
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    q_norm: NormSpec
    k_norm: NormSpec
    gate: str
    kind: Literal["cross"] = "cross"

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.q, self.k, self.v, self.o)

    def readers(self) -> tuple[LinearSpec, ...]:
        return (self.q,)

    def adaptable(self) -> tuple[LinearSpec, ...]:
        return (self.q, self.o)

    def width(self, hidden: int) -> int:
        return 4 * self.heads * self.head_dim

    def norms(self) -> tuple[NormSpec, ...]:
        return (self.q_norm, self.k_norm)

    def vectors(self) -> dict[str, int]:
        return {self.gate: 1}

    @property
    def row(self) -> int:
        """Numbers that are kept of each row of a picture."""
        return 2 * self.kv_heads * self.head_dim

    def unshared(self, world: int, unit: Unit) -> str | None:
        return unfit(self.heads, self.kv_heads, self.o, self.head_dim, world, unit)

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """Heads of its own, of what is kept of pictures too."""
        heads, kv_heads = own_heads(self.heads, self.kv_heads, rank, world)
        own, kept = by(self.head_dim, heads, kv_heads)
        made, cuts = cut_linears(self, q=[own], k=[kept], v=[kept], o=[own])
        return Share(replace(self, heads=heads[1] - heads[0], kv_heads=kv_heads[1] - kv_heads[0], **made), cuts)

    def check(self, hidden: int) -> None:
        sound.projections(self, hidden)
        for norm in self.norms():
            sound.norm(norm, self.head_dim)
