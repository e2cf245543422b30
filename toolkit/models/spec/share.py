"""How a layer is shared out among ranks that compute a part of it each (tensor parallelism), as data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal, NamedTuple

from toolkit.base.lazy_dataclass import dataclass
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


Span = tuple[int, int]
"""(start, stop)"""


@dataclass(frozen=True)
class Cut:
    """``more``: of rows, further spans behind the first one."""

    axis: Axis
    start: int = 0
    stop: int = 0
    more: tuple[Span, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        return ((self.start, self.stop), *self.more)


@dataclass(frozen=True)
class Share:
    """Of one rank: ``mixer``, what it computes of a whole one, and which part of each parameter it reads for that; of
    those that are not in ``cuts`` all."""

    mixer: Any
    cuts: Mapping[str, Cut] = field(default_factory=dict)


def portion(size: int, rank: int, world: int, unit: int = 1) -> Span:
    """(start, stop) of a rank's part of ``size``, in units as evenly as that goes; the first ranks have the larger."""
    most, more = divmod(-(-size // unit), world)
    start = rank * most + min(rank, more)
    return min(start * unit, size), min((start + most + (rank < more)) * unit, size)


def cut_linears(mixer: Any, **spans: Sequence[Span]) -> tuple[dict[str, Any], dict[str, Cut]]:
    """The linears in these fields of ``mixer``, those that shard by rows with one span of their inputs, the others with
    spans of their outputs, one behind the other; and how their parameters are cut."""
    made: dict[str, Any] = {}
    cuts: dict[str, Cut] = {}
    for name, own in spans.items():
        linear: LinearSpec | None = getattr(mixer, name)
        if linear is None:
            continue
        if linear.shard == "row":
            ((start, stop),) = own
            made[name] = replace(linear, in_features=stop - start)
            cut, of_bias = Cut("columns", start, stop), Cut("first")
        else:
            made[name] = replace(linear, out_features=sum(stop - start for start, stop in own))
            cut = of_bias = rows(*own)
        cuts |= {linear.name: cut} | ({f"{linear.name}.bias": of_bias} if linear.bias else {})
    return made, cuts


def rows(*spans: Span) -> Cut:
    """Rows of these spans, of which there is one at least."""
    (start, stop), *more = spans
    return Cut("rows", start, stop, tuple(more))


def by(size: int, *spans: Span) -> tuple[Span, ...]:
    """Spans of things that have ``size`` numbers each, in numbers."""
    return tuple((start * size, stop * size) for start, stop in spans)


def beside(spans: Sequence[tuple[int, Span]]) -> tuple[Span, ...]:
    """(size of a whole, the span of it) of each of several wholes that stand one behind the other."""
    starts = itertools.accumulate((size for size, _ in spans), initial=0)
    return tuple((at + start, at + stop) for at, (_, (start, stop)) in zip(starts, spans, strict=False))


# -- heads of which several share what one of fewer has: keys and values, or b and c of a state


def own_heads(heads: int, few: int, rank: int, world: int) -> tuple[Span, Span]:
    """A rank's heads, and of the ``few`` those that they share: where there are fewer of these than ranks, several
    ranks have the same one; else each has some, as evenly as that goes, with all that share them."""
    if few == 1:
        return portion(heads, rank, world), (0, 1)
    if few < world:
        each, kept = heads // world, rank * few // world
        return (rank * each, (rank + 1) * each), (kept, kept + 1)
    first, stop = portion(few, rank, world)
    each = heads // few
    return (first * each, stop * each), (first, stop)


def unfit_heads(heads: int, few: int, world: int, what: str = "keys and values") -> str | None:
    """Why ``own_heads`` gives no rank its own, with numbers of ranks that would do, or None."""
    if few == 1:
        return None if heads >= world else f"{heads} heads do not divide among {world} ranks; {heads} would do"
    if few >= world or (world % few == 0 and heads % world == 0):
        return None
    good = [*range(2, few + 1), *(n for n in range(few + 1, heads + 1) if heads % n == 0 and n % few == 0)]
    fits = f"; {', '.join(map(str, good))} would do" if good else ""
    return f"{heads} heads and {few} of {what} do not divide among {world} ranks{fits}"


def unfit_inputs(linear: LinearSpec, spans: Sequence[Span], unit: Unit) -> str | None:
    """Why ranks cannot have these inputs of a linear, each rank a span, or None."""
    least = unit(linear.name).least
    for rank, (start, stop) in enumerate(spans):
        if start % least or (stop % least and stop != linear.in_features):
            return f"{linear.name}: rank {rank}'s inputs {start} to {stop - 1} cut a group of {least} weights"
    return None


def unfit_inner(end: LinearSpec, inner: int, world: int, unit: Unit) -> str | None:
    """Why ranks cannot have some each of the ``inner`` features that ``end`` reads, or None."""
    size = unit(end.name).best
    if inner // size >= world:
        return None
    what = f"{inner // size} groups of {size} inner features" if size > 1 else f"{inner} inner features"
    return f"{end.name}: {what} are fewer than {world} ranks"


def unfit(
    heads: int, few: int, end: LinearSpec, size: int, world: int, unit: Unit, what: str = "keys and values"
) -> str | None:
    """Why ranks cannot have heads of their own (see ``own_heads``), each with ``size`` inputs of ``end``, or None."""
    if (reason := unfit_heads(heads, few, world, what)) is not None:
        return reason
    return unfit_inputs(end, by(size, *(own_heads(heads, few, rank, world)[0] for rank in range(world))), unit)
