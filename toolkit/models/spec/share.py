"""How a layer is shared out among ranks that compute a part of it each (tensor parallelism), as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from toolkit.models.spec.parts import LinearSpec

Axis = Literal["rows", "columns", "first"]
"""What is cut. "first": nothing, the first rank has it whole and the others zeros, for what ranks give is added."""


class Units(NamedTuple):
    """How many inputs of a weight belong together: it is best cut between ``best``, and cannot be but between
    ``least``."""

    best: int
    least: int


Unit = Callable[[str], Units]
"""By a linear's name."""


@dataclass(frozen=True)
class Cut:
    axis: Axis
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Share:
    """Of one rank: ``mixer``, what it computes of a whole one, and which part of each parameter it reads for that; of
    those that are not in ``cuts`` all."""

    mixer: Any
    cuts: Mapping[str, Cut] = field(default_factory=dict)


def portion(size: int, rank: int, world: int, unit: int = 1) -> tuple[int, int]:
    """(start, stop) of a rank's part of ``size``, in units as evenly as that goes; the first ranks have the larger."""
    most, more = divmod(-(-size // unit), world)
    start = rank * most + min(rank, more)
    return min(start * unit, size), min((start + most + (rank < more)) * unit, size)


def cut_linear(linear: LinearSpec, start: int, stop: int) -> tuple[LinearSpec, dict[str, Cut]]:
    """A linear with a part of its outputs or its inputs, as it says that it shards, and how its parameters are cut."""
    if linear.shard == "column":
        cuts = {linear.name: Cut("rows", start, stop)}
        cuts |= {f"{linear.name}.bias": Cut("rows", start, stop)} if linear.bias else {}
        return replace(linear, out_features=stop - start), cuts
    assert linear.shard == "row", linear
    cuts = {linear.name: Cut("columns", start, stop)} | ({f"{linear.name}.bias": Cut("first")} if linear.bias else {})
    return replace(linear, in_features=stop - start), cuts
