"""Linear attention by the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import sound
from toolkit.models.spec.keeps import State, StatePart
from toolkit.models.spec.mixer import MixerSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec
from toolkit.models.spec.share import Share, Unit, beside, by, cut_linears, own_heads, rows, unfit
from toolkit.models.spec.short_conv import ConvSpec


@dataclass(frozen=True)
class DeltaSpec(MixerSpec):
    """``out(norm(y) · silu(z(x)))``, y by a recurrence over the tokens.

    ``qkv(x)``, convolved and through silu, gives q and k of ``k_heads`` heads of ``k_dim``, then v of ``heads`` heads
    of ``v_dim``; neighbouring heads share q and k, which are divided by their length, and q by √k_dim too. With the
    state S [k_dim, v_dim] of a head, β = sigmoid(beta(x)) and g = −exp(a_log) · softplus(fade(x) + dt_bias):
    S ← exp(g) · S; S ← S + k ⊗ β(v − kᵀS); y = qᵀS. The norm takes a head at a time. ``beta`` and ``fade``, a number a
    head, are not quantized.
    """

    qkv: LinearSpec
    z: LinearSpec
    beta: LinearSpec
    fade: LinearSpec
    conv: ConvSpec
    a_log: str
    dt_bias: str
    norm: NormSpec
    out: LinearSpec
    k_heads: int
    k_dim: int
    heads: int
    v_dim: int
    group: int = 0
    kind: Literal["delta"] = "delta"

    def linears(self) -> tuple[LinearSpec, ...]:
        return (*self.readers(), *self.routers(), self.out)

    def readers(self) -> tuple[LinearSpec, ...]:
        return self.qkv, self.z

    def routers(self) -> tuple[LinearSpec, ...]:
        return self.beta, self.fade

    def width(self, hidden: int) -> int:
        return 6 * (2 * self.heads * self.k_dim + 2 * self.heads * self.v_dim)

    def norms(self) -> tuple[NormSpec, ...]:
        return (self.norm,)

    def vectors(self) -> dict[str, int]:
        return self.conv.vectors() | {self.a_log: self.heads, self.dt_bias: self.heads}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.conv.shapes()

    def keeps(self) -> State:
        return State((self.conv.tail, StatePart((self.heads, self.k_dim, self.v_dim), wide=True)))

    def unshared(self, world: int, unit: Unit) -> str | None:
        return unfit(self.heads, self.k_heads, self.out, self.v_dim, world, unit, "q and k")

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """Heads of its own, with the q and k that they share."""
        heads, k_heads = own_heads(self.heads, self.k_heads, rank, world)
        (own,), (kept,) = by(self.v_dim, heads), by(self.k_dim, k_heads)
        keys = self.k_heads * self.k_dim
        channels = beside([(keys, kept), (keys, kept), (self.heads * self.v_dim, own)])
        made, cuts = cut_linears(self, qkv=channels, z=[own], beta=[heads], fade=[heads], out=[own])
        conv, convolved = self.conv.part(*channels)
        cuts |= convolved | dict.fromkeys((self.a_log, self.dt_bias), rows(heads))
        return Share(replace(self, conv=conv, heads=heads[1] - heads[0], k_heads=k_heads[1] - k_heads[0], **made), cuts)

    def check(self, hidden: int) -> None:
        keys, values = self.k_heads * self.k_dim, self.heads * self.v_dim
        sound.expect("k_heads", self.heads % self.k_heads == 0, self.k_heads, f"a divisor of {self.heads}")
        sound.linear(self.qkv, hidden, 2 * keys + values)
        sound.linear(self.z, hidden, values)
        sound.linear(self.beta, hidden, self.heads)
        sound.linear(self.fade, hidden, self.heads)
        self.conv.check(2 * keys + values)
        sound.norm(self.norm, self.v_dim)
        sound.linear(self.out, values, hidden)
