"""Embeddings that every layer has of its own (per-layer embeddings, PLE: Gemma 3n, Gemma 4 E2B and E4B)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import sound
from toolkit.models.spec.mixer import MixerSpec
from toolkit.models.spec.parts import Activation, LinearSpec, NormSpec
from toolkit.models.spec.share import Share, Unit, cut_linears, portion, unfit_inner


@dataclass(frozen=True)
class PerLayerTable:
    """What layers are given of each token, ``columns`` numbers that they have parts of: ``(norm(projection(x) ·
    projection_scale) + row · embed_scale) · scale``, x being what the residual stream begins with and row that of the
    token in the matrix ``embed`` [rows, columns]. The norm is over ``norm.size`` numbers at a time. Tokens of pictures
    have row ``pad``."""

    embed: str
    rows: int
    embed_scale: float
    projection: LinearSpec
    projection_scale: float
    norm: NormSpec
    scale: float
    pad: int = 0

    @property
    def columns(self) -> int:
        return self.projection.out_features

    def check(self, vocab: int, hidden: int) -> None:
        """Raise ValueError for numbers that cannot be."""
        sound.linear(self.projection, hidden, self.columns)
        sound.expect("rows", self.rows >= vocab, self.rows, f"at least {vocab}, one a token")
        sound.expect("pad", self.pad < self.rows, self.pad, f"below {self.rows}")
        sound.norm(self.norm, self.norm.size)
        sound.expect("norm", self.columns % self.norm.size == 0, self.norm.size, f"a divisor of {self.columns}")
        sound.expect("bias", not self.projection.bias, self.projection.bias, "none of the projection")


@dataclass(frozen=True)
class PerLayerSpec(MixerSpec):
    """``down(act(gate(x)) · given)``, where given are the columns from ``at`` on of what ``PerLayerTable`` gives the
    token."""

    gate: LinearSpec
    down: LinearSpec
    activation: Activation
    at: int
    kind: Literal["per_layer"] = "per_layer"

    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.gate, self.down)

    def readers(self) -> tuple[LinearSpec, ...]:
        return (self.gate,)

    def width(self, hidden: int) -> int:
        return 3 * self.gate.out_features

    def unshared(self, world: int, unit: Unit) -> str | None:
        return unfit_inner(self.down, self.gate.out_features, world, unit)

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        own = portion(self.gate.out_features, rank, world, unit(self.down.name).best)
        made, cuts = cut_linears(self, gate=[own], down=[own])
        return Share(replace(self, at=self.at + own[0], **made), cuts)

    def check(self, hidden: int) -> None:
        sound.expect("activation", self.activation != "swigluoai", self.activation, "one that needs no second half")
        sound.linear(self.gate, hidden, self.gate.out_features)
        sound.linear(self.down, self.gate.out_features, hidden)
