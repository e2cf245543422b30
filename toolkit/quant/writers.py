"""The formats a quantized checkpoint can be written in, by the name that ``--format`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from toolkit.artifacts.canonical import Weight
from toolkit.artifacts.formats import awq, blocked_fp8, compressed_tensors, gptq, mxfp4, w8a8
from toolkit.artifacts.formats.describe import Layout
from toolkit.errors import UsageError
from toolkit.models.spec import LinearSpec


@dataclass(frozen=True)
class Writer:
    """``write``: tensors of one linear; ``cannot_hold``: why a weight has no form there, or None; ``config``: the
    ``quantization_config`` of linears by name, None standing for one left dense."""

    name: str
    write: Callable[[str, Weight], dict[str, Tensor]]
    cannot_hold: Callable[[Weight], str | None]
    config: Callable[[Mapping[str, Layout | None]], dict[str, Any]]


WRITERS: dict[str, Writer] = {
    w.name: w
    for w in (
        Writer("awq", awq.write_linear, awq.cannot_hold, awq.config_of),
        Writer("gptq", gptq.write_linear, gptq.cannot_hold, gptq.config),
        Writer(
            "gptq_v2",
            partial(gptq.write_linear, version=2),
            partial(gptq.cannot_hold, version=2),
            partial(gptq.config, version=2),
        ),
        Writer(
            "compressed-tensors",
            compressed_tensors.write_linear,
            compressed_tensors.cannot_hold,
            compressed_tensors.config,
        ),
        Writer("w8a8", w8a8.write_linear, w8a8.cannot_hold, w8a8.config_of),
        Writer("fp8", blocked_fp8.write_linear, blocked_fp8.cannot_hold, blocked_fp8.config),
        Writer("mxfp4", mxfp4.write_linear, mxfp4.cannot_hold, mxfp4.config),
    )
}


def choose_writer(
    wanted: str | None, offered: Sequence[str], linears: Sequence[LinearSpec], sample: Callable[[int, int], Weight]
) -> Writer:
    """The writer called ``wanted``, by default the first of ``offered`` (what the method makes sense in).

    ``sample(out, in)`` makes a stand-in of the weight that the method will produce. Raises UsageError where the format
    cannot hold one of ``linears``, before anything is computed.
    """
    name = wanted or offered[0]
    if name not in offered:
        raise UsageError(f"--format: expected {' or '.join(offered)} for this method, found {name!r}")
    for linear in linears:
        if reason := WRITERS[name].cannot_hold(sample(linear.out_features, linear.in_features)):
            others = [o for o in offered if not _refuses(o, linears, sample)]
            advice = f"try --format {others[0]}" if others else "no format holds it; leave the layer out with --skip"
            raise UsageError(f"--format {name}: {linear.name}: {reason}; {advice}")
    return WRITERS[name]


def _refuses(name: str, linears: Sequence[LinearSpec], sample: Callable[[int, int], Weight]) -> bool:
    return any(WRITERS[name].cannot_hold(sample(x.out_features, x.in_features)) for x in linears)
