"""How a checkpoint spells and shapes the parameters of a spec."""

from __future__ import annotations

import math
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass

Rows = tuple[tuple[int, int] | tuple[int, int, int], ...]
"""Arguments of ``range``, one after another."""


@dataclass(frozen=True)
class Part:
    """One canonical parameter inside a stored tensor: the given ``rows`` of it, in order; None = all of it.

    Rows alone: groups of quantized weights run along the columns, so that no format could be cut there.
    """

    name: str
    rows: Rows | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A module as the checkpoint spells it and the canonical parameters it holds.

    ``name`` is the module's name on disk without ``.weight`` / ``.bias`` / ``.qweight`` …; a fused one
    (phi3 ``qkv_proj``, internlm2 ``wqkv``) has several parts. ``kind`` tells the quantizers what may be quantized:
    "linear" (a linear inside a layer), "router" (never quantized), "embed", "head", "norm", "vector" (no
    ``.weight`` suffix, e.g. sinks), "vision" (any tensor of what a model sees with, by its whole name; its rows are
    numbers of the flat tensor). ``shape``: of the dense weight as stored. ``optional`` ones may be absent.

    Whatever its shape, a module is worked with as the matrix of ``matrix`` (or as a vector), a row an output feature,
    of which parts take rows: the matrices of a stack [experts, out, in] stand one below the other. ``transposed``: the
    stored ones are [in, out]. ``flat``: a stack stored as one matrix, one of its own below the other. ``bare``: tensors
    are named ``name`` and ``name_bias``. ``unit_rows``: rows are divided by their length as they are read (Baichuan 2's
    head); where they are quantized they were already.
    """

    name: str
    kind: Literal["linear", "router", "embed", "head", "norm", "vector", "vision"]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    bias: bool = False
    optional: bool = False
    transposed: bool = False
    bare: bool = False
    flat: bool = False
    unit_rows: bool = False

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """Of the dense weight's tensor."""
        return (self.shape[0] * self.shape[1], *self.shape[2:]) if self.flat else self.shape

    @property
    def straight(self) -> tuple[int, ...]:
        """``shape`` if it were not ``transposed``."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    @property
    def matrix(self) -> tuple[int, ...]:
        """Rows and columns, or for norms and vectors the numbers in it."""
        if self.kind in ("norm", "vector", "vision"):
            return (math.prod(self.shape),)
        return math.prod(self.straight[:-1]), self.straight[-1]

    @property
    def stacked(self) -> bool:
        """Whether it is several matrices."""
        return len(self.shape) > 2 and len(self.matrix) == 2

    @property
    def weight_name(self) -> str:
        return self.name if self.bare or self.kind in ("vector", "vision") else f"{self.name}.weight"

    @property
    def bias_name(self) -> str:
        return f"{self.name}_bias" if self.bare else f"{self.name}.bias"

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return self.shape if self.kind == "norm" else self.straight[:-1]

    def rows_of(self, part: Part) -> list[int]:
        """The numbers of a part's rows, in order."""
        return [i for r in part.rows or ((0, self.matrix[0]),) for i in range(*r)]

    def count(self, part: Part) -> int:
        """How many rows a part has."""
        return sum(len(range(*r)) for r in part.rows or ((0, self.matrix[0]),))

    def alone(self) -> list[StoredTensor]:
        """Each part as a module of its own under its canonical name: what formats that know no stacks make of one."""
        return [
            StoredTensor(p.name, self.kind, (self.count(p), self.matrix[1]), (Part(p.name),), self.bias)
            for p in self.parts
        ]
