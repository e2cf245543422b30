"""The feed-forward part of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later
from toolkit.models.spec import sound
from toolkit.models.spec.mixer import MixerSpec
from toolkit.models.spec.parts import Activation, LinearSpec, NormSpec, Spread
from toolkit.models.spec.share import Cut, Share, Unit, cut_linears, portion, unfit_inner

XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # numbers of xielu


@dataclass(frozen=True)
class MlpSpec(MixerSpec):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where ``gate`` is None.

    ``gate_scale`` multiplies gate(x) (Falcon-H1). ``seen`` names a number whose tanh multiplies what it gives, which is
    nothing for tokens that see no picture (Llama 3.2 Vision). "relu2" is the square of relu.
    ``inner_norm``: of what ``down`` reads (BitNet).
    "swigluoai" (gpt-oss, gated alone): g · sigmoid(1.702 g) · (u + 1) with g = min(gate(x), 7), u = up(x) within ±7.
    "xielu" (Apertus, without a gate): see ``kernels/reference/activation.py``; ``curve`` names the module with its
    numbers, of which two are learned.
    """

    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec
    activation: Activation = "silu"
    gate_scale: float = later(1.0)
    seen: str | None = later(None)
    inner_norm: NormSpec | None = later(None)
    curve: str | None = later(None)
    kind: Literal["mlp"] = "mlp"

    def linears(self) -> tuple[LinearSpec, ...]:
        return (*self.readers(), self.down)

    def readers(self) -> tuple[LinearSpec, ...]:
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def input_name(self) -> str:
        return self.up.name

    def width(self, hidden: int) -> int:
        return 3 * self.up.out_features

    def norms(self) -> tuple[NormSpec, ...]:
        return () if self.inner_norm is None else (self.inner_norm,)

    def vectors(self) -> dict[str, int]:
        return ({} if self.seen is None else {self.seen: 1}) | dict.fromkeys(self.curves(), 1)

    def curves(self) -> tuple[str, ...]:
        """Names of the numbers that xielu takes, in its order."""
        return () if self.curve is None else tuple(f"{self.curve}.{name}" for name in XIELU)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {} if self.curve is None else {name: () for name in self.curves()[2:]}

    def mlps(self) -> tuple[MlpSpec, ...]:
        return (self,)

    def unshared(self, world: int, unit: Unit) -> str | None:
        return unfit_inner(self.down, self.up.out_features, world, unit)

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        own = portion(self.up.out_features, rank, world, unit(self.down.name).best)
        made, cuts = cut_linears(self, up=[own], down=[own], gate=[own])
        if self.inner_norm is not None:
            made["inner_norm"] = replace(self.inner_norm, size=own[1] - own[0], spread=Spread(self.inner_norm.size))
            cuts |= dict.fromkeys(self.inner_norm.vectors(), Cut("rows", *own))
        return Share(replace(self, **made), cuts)

    def check(self, hidden: int) -> None:
        inner, gated = self.up.out_features, self.gate is not None
        sound.expect("activation", self.activation != "swigluoai" or gated, self.activation, "one that needs no gate")
        shaped = self.activation == "xielu"
        sound.expect("curve", shaped == (self.curve is not None), self.curve, "a name with xielu alone")
        sound.expect("activation", not (shaped and gated), self.activation, "one that has a gate")
        sound.expect("gate_scale", self.gate_scale == 1 or gated, self.gate_scale, "1 without a gate")
        for x in self.readers():
            sound.linear(x, hidden, inner)
        sound.linear(self.down, inner, hidden)
        if self.inner_norm is not None:
            sound.norm(self.inner_norm, inner)
