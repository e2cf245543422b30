"""A state space model whose state fades by one number a head. Mamba-2 (Dao and Gu, arXiv 2405.21060)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import sound
from toolkit.models.spec.keeps import State, StatePart
from toolkit.models.spec.mixer import MixerSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec, Spread
from toolkit.models.spec.share import Share, Unit, beside, by, cut_linears, own_heads, rows, unfit_heads, unfit_inputs
from toolkit.models.spec.short_conv import ConvSpec


@dataclass(frozen=True)
class MambaSpec(MixerSpec):
    """``out(norm(y · silu(z(x))))``, y by a recurrence over the tokens.

    ``inner(x)``, convolved and through silu, gives the heads' inputs u [heads, head_dim], then b and c [groups,
    state_size], which neighbouring heads share; d = softplus(dt(x) + dt_bias), at least ``least``. With the state H
    [head_dim, state_size] of a head: H ← exp(−exp(a_log) · d) · H + d · u ⊗ b; y = H · c + skip · u. The norm's numbers
    are normed in ``groups`` parts, and with ``norm_first`` before silu(z) multiplies them; ``norm`` None: there is
    none. ``scales``: what z, u, b, c and dt are multiplied by as they are made, () for nothing (Falcon-H1).
    """

    z: LinearSpec
    inner: LinearSpec
    dt: LinearSpec
    conv: ConvSpec
    a_log: str
    dt_bias: str
    skip: str
    norm: NormSpec | None
    out: LinearSpec
    heads: int
    head_dim: int
    groups: int
    state_size: int
    least: float = 0.0
    norm_first: bool = False
    scales: tuple[float, ...] = ()
    group: int = 0
    kind: Literal["mamba"] = "mamba"

    @property
    def width_out(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    def linears(self) -> tuple[LinearSpec, ...]:
        return (*self.readers(), self.out)

    def readers(self) -> tuple[LinearSpec, ...]:
        return self.z, self.inner, self.dt

    def width(self, hidden: int) -> int:
        return 8 * (self.width_out + self.groups * self.state_size)

    def norms(self) -> tuple[NormSpec, ...]:
        return () if self.norm is None else (self.norm,)

    def vectors(self) -> dict[str, int]:
        return self.conv.vectors() | dict.fromkeys((self.a_log, self.dt_bias, self.skip), self.heads)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.conv.shapes()

    def keeps(self) -> State:
        return State((self.conv.tail, StatePart((self.heads, self.head_dim, self.state_size), wide=True)))

    def unshared(self, world: int, unit: Unit) -> str | None:
        if (reason := unfit_heads(self.heads, self.groups, world, "b and c")) is not None:
            return reason
        own = [own_heads(self.heads, self.groups, rank, world)[0] for rank in range(world)]
        return unfit_inputs(self.out, by(self.head_dim, *own), unit)

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """Heads of its own, with the b and c that they share."""
        heads, groups = own_heads(self.heads, self.groups, rank, world)
        (own,), (kept,) = by(self.head_dim, heads), by(self.state_size, groups)
        shared = self.groups * self.state_size
        channels = beside([(self.width_out, own), (shared, kept), (shared, kept)])
        made, cuts = cut_linears(self, z=[own], inner=channels, dt=[heads], out=[own])
        conv, convolved = self.conv.part(*channels)
        cuts |= convolved | dict.fromkeys((self.a_log, self.dt_bias, self.skip), rows(heads))
        norm = self.norm
        if norm is not None:
            spread = Spread(self.width_out // self.groups, groups[0], self.groups) if self.groups < world else None
            norm = replace(norm, size=own[1] - own[0], spread=spread)
            cuts |= dict.fromkeys(norm.vectors(), rows(own))
        own_sizes = replace(self, heads=heads[1] - heads[0], groups=groups[1] - groups[0])
        return Share(replace(own_sizes, conv=conv, norm=norm, **made), cuts)

    def check(self, hidden: int) -> None:
        inner, shared = self.width_out, self.groups * self.state_size
        sound.expect("groups", self.heads % self.groups == 0, self.groups, f"a divisor of {self.heads}")
        sound.linear(self.z, hidden, inner)
        sound.linear(self.inner, hidden, inner + 2 * shared)
        sound.linear(self.dt, hidden, self.heads)
        self.conv.check(inner + 2 * shared)
        if self.norm is not None:
            sound.norm(self.norm, inner)
            sound.expect(self.norm.name, inner % self.groups == 0, self.groups, f"a divisor of {inner}")
        sound.expect("scales", len(self.scales) in (0, 5), self.scales, "five numbers or none")
        sound.expect("least", self.least >= 0, self.least, "a number of 0 or more")
        sound.linear(self.out, inner, hidden)
