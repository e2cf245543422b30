"""Attention to keys and values that an earlier layer keeps (KV sharing: arXiv 2405.12981; Gemma 3n, Gemma 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later
from toolkit.models.spec import sound
from toolkit.models.spec.mixer import MixerSpec, Rotary
from toolkit.models.spec.parts import LinearSpec, NormSpec, RopeSpec
from toolkit.models.spec.share import Share, Unit, by, cut_linears, own_heads, unfit


@dataclass(frozen=True)
class ReuseSpec(MixerSpec):
    """``o(attention(q(x), keys, values))`` with keys and values of layer ``source``, whose attention has as many
    ``kv_heads`` of ``head_dim`` numbers; it is scaled and sees as far as that one. The rest as of ``AttentionSpec``.
    ``group`` is the source's. ``outside``: that is a layer of another model, whose cache this one reads and does not
    write, and a query sees so many of the ``newest`` tokens there, or all (None); its own is not among them."""

    q: LinearSpec
    o: LinearSpec
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    source: int
    q_norm: NormSpec | None = None
    group: int = later(0)
    outside: bool = later(False)
    newest: int | None = later(None)
    kind: Literal["reuse"] = "reuse"

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.q, self.o)

    def readers(self) -> tuple[LinearSpec, ...]:
        return (self.q,)

    def width(self, hidden: int) -> int:
        return 4 * self.heads * self.head_dim

    def norms(self) -> tuple[NormSpec, ...]:
        return () if self.q_norm is None else (self.q_norm,)

    def ropes(self) -> tuple[RopeSpec, ...]:
        return () if self.rope is None else (self.rope,)

    def rotary(self) -> dict[str, Rotary]:
        if self.rope is None:
            return {}
        return dict.fromkeys(
            (self.q.name, *(n.name for n in self.norms())), Rotary(self.head_dim, 0, self.rope.rotary_dim)
        )

    def unshared(self, world: int, unit: Unit) -> str | None:
        return unfit(self.heads, self.kv_heads, self.o, self.head_dim, world, unit)

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """Heads of its own, those that read the keys which this rank's source keeps."""
        heads, kv_heads = own_heads(self.heads, self.kv_heads, rank, world)
        (own,) = by(self.head_dim, heads)
        made, cuts = cut_linears(self, q=[own], o=[own])
        return Share(replace(self, heads=heads[1] - heads[0], kv_heads=kv_heads[1] - kv_heads[0], **made), cuts)

    def check(self, hidden: int) -> None:
        size = self.heads * self.head_dim
        sound.expect("kv_heads", self.heads % self.kv_heads == 0, self.kv_heads, f"a divisor of {self.heads}")
        sound.linear(self.q, hidden, size)
        sound.linear(self.o, size, hidden)
        if self.q_norm is not None:
            sound.norm(self.q_norm, self.head_dim)
        if self.rope is not None:
            sound.rope(self.rope, self.head_dim)
