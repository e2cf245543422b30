"""A gated short convolution. LFM2 (Liquid AI, 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import sound
from toolkit.models.spec.keeps import State, StatePart
from toolkit.models.spec.mixer import MixerSpec
from toolkit.models.spec.parts import LinearSpec
from toolkit.models.spec.share import Cut, Share, Span, Unit, by, cut_linears, portion, rows


@dataclass(frozen=True)
class ConvSpec:
    """A causal convolution of each channel by itself over the last ``kernel`` tokens.

    ``weight`` [channels, kernel], the newest token last, and ``bias`` [channels] or None: names.
    """

    weight: str
    bias: str | None
    channels: int
    kernel: int

    def vectors(self) -> dict[str, int]:
        """Its parameters: name → numbers in it."""
        return {self.weight: self.channels * self.kernel} | ({} if self.bias is None else {self.bias: self.channels})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As checkpoints store them: name → shape, of those that are not flat."""
        return {self.weight: (self.channels, 1, self.kernel)}

    @property
    def tail(self) -> StatePart:
        """The inputs that the next token's output needs, oldest first."""
        return StatePart((self.kernel - 1, self.channels))

    def part(self, *spans: Span) -> tuple[ConvSpec, dict[str, Cut]]:
        """That of some of the channels."""
        cuts = {self.weight: rows(*by(self.kernel, *spans))} | ({} if self.bias is None else {self.bias: rows(*spans)})
        return replace(self, channels=sum(stop - start for start, stop in spans)), cuts

    def check(self, channels: int) -> None:
        """Raise ValueError for numbers that cannot be."""
        sound.expect("channels", self.channels == channels, self.channels, f"{channels}")
        sound.expect("kernel", 2 <= self.kernel <= 64, self.kernel, "2 to 64")


@dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """``out(c(x) * conv(b(x) * value(x)))``."""

    b: LinearSpec
    c: LinearSpec
    value: LinearSpec
    conv: ConvSpec
    out: LinearSpec
    group: int = 0
    kind: Literal["short_conv"] = "short_conv"

    def linears(self) -> tuple[LinearSpec, ...]:
        return (*self.readers(), self.out)

    def readers(self) -> tuple[LinearSpec, ...]:
        return self.b, self.c, self.value

    def width(self, hidden: int) -> int:
        return (6 + self.conv.kernel) * self.conv.channels

    def vectors(self) -> dict[str, int]:
        return self.conv.vectors()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.conv.shapes()

    def keeps(self) -> State:
        return State((self.conv.tail,))

    def unshared(self, world: int, unit: Unit) -> str | None:
        count, size = self.conv.channels, unit(self.out.name).best
        if count // size >= world:
            return None
        what = f"{count // size} groups of {size} channels" if size > 1 else f"{count} channels"
        return f"{self.out.name}: {what} are fewer than {world} ranks"

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """Channels of its own."""
        own = portion(self.conv.channels, rank, world, unit(self.out.name).best)
        conv, convolved = self.conv.part(own)
        made, cuts = cut_linears(self, b=[own], c=[own], value=[own], out=[own])
        return Share(replace(self, conv=conv, **made), cuts | convolved)

    def check(self, hidden: int) -> None:
        inner = self.value.out_features
        for x in self.readers():
            sound.linear(x, hidden, inner)
        self.conv.check(inner)
        sound.linear(self.out, inner, hidden)
