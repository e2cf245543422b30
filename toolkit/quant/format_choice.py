"""Choosing the format that a quantized checkpoint is written in, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolkit.artifacts.canonical import Weight
from toolkit.artifacts.formats.writers import WRITERS
from toolkit.errors import UsageError
from toolkit.models.spec import LinearSpec
from toolkit.quant import gguf


def choose_format(
    wanted: str | None, offered: Sequence[str], linears: Sequence[LinearSpec], sample: Callable[[int, int], Weight]
) -> str:
    """The format called ``wanted``, by default the first of ``offered`` (what the method makes sense in).

    ``sample(out, in)`` makes a stand-in of the weight that the method will produce. Raises UsageError where the format
    cannot hold one of ``linears``, before anything is computed.
    """
    name = wanted or offered[0]
    if name not in offered:
        raise UsageError(f"--format: expected {' or '.join(offered)} for this method, found {name!r}")
    for linear in linears:
        if reason := _reason(name, sample(linear.out_features, linear.in_features)):
            others = [o for o in offered if not any(_reason(o, sample(x.out_features, x.in_features)) for x in linears)]
            advice = f"try --format {others[0]}" if others else "no format holds it; leave the layer out with --skip"
            raise UsageError(f"--format {name}: {linear.name}: {reason}; {advice}")
    return name


def _reason(name: str, weight: Weight) -> str | None:
    return gguf.cannot_hold(weight) if name == gguf.FORMAT else WRITERS[name].cannot_hold(weight)
