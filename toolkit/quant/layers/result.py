"""What quantizing a layer gives, and how it is kept on disk until all layers are done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp4, Fp8, GroupInt, SuperScales, Trellis, Weight
from toolkit.artifacts.scales import UNSCALED, AllScales, Scales
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.models.sites import Site
from toolkit.quant.layers.lazy import KEEP, Lazy
from toolkit.quant.layers.statistics import Gram
from toolkit.runners.weights.folding import Folded

FOLDED = "folded."  # before the names of a linear's scales
_FORMS: dict[str, Any] = {c.__name__: c for c in (Dense, GroupInt, ChannelInt8, Fp8, BlockFp8, Fp4, Trellis)}


@dataclass(frozen=True)
class LinearReport:
    """One quantized linear. ``rel_error``: ‖X(W−Ŵ)ᵀ‖ / ‖XWᵀ‖ on the calibration inputs X, Frobenius norms.
    ``method`` "weight-only": no input was ever seen. ``dead_inputs``: how many channels were always zero."""

    name: str
    method: str
    bits: int
    group_size: int  # -1: one scale a row
    rel_error: float
    dead_inputs: int = 0


@dataclass(frozen=True)
class Made:
    """A canonical parameter as a method made it; ``report`` where it is a quantized linear; ``scales``: of a linear,
    what has been folded into it."""

    name: str
    value: Weight | Tensor
    report: LinearReport | None = None
    scales: Scales = UNSCALED


@dataclass(frozen=True)
class LayerResult:
    """A layer after quantization: canonical parameters by name, a report for every quantized linear, and what has been
    folded into linears, of those that it has been."""

    weights: Mapping[str, Weight | Tensor]
    reports: list[LinearReport]
    scales: AllScales = dataclasses.field(default_factory=dict)

    def dense(self, device: torch.device | str = "cpu", room: int = KEEP) -> Mapping[str, Tensor]:
        """The layer as it will behave: float32 tensors by canonical name, made when they are asked for; ``room`` bytes
        of them are kept."""

        def make(name: str) -> Tensor:
            value = self.weights[name]
            return (value if isinstance(value, Tensor) else value.dequantize()).float().to(device)

        return Lazy(self.weights, make, room)

    def made(self) -> Iterator[Made]:
        """Its parameters one by one."""
        reports = {r.name: r for r in self.reports}
        return (Made(n, value, reports.get(n), self.scales.get(n, UNSCALED)) for n, value in self.weights.items())


Method = Callable[[Sequence[Site], Mapping[str, Tensor], Callable[[str], Gram | None]], Iterator[Made]]
"""(sites to quantize, the layer's float32 weights, statistics of a site by name) → all parameters of the layer.

Nothing is held that was made: a layer may be larger than memory. Sites are gone through from the last to the first, for
that is the order in which statistics are handed out, each once, and a scale folds into what comes before it. Statistics
are None where calibration says nothing. Weights of sites that are not given come back as they are.
"""


OneSite = Callable[[Site, Mapping[str, Tensor], Folded, Gram | None], Iterator[Made]]
"""(site, the layer's weights as they came, the same with all scales so far, the site's statistics) → its linears."""


def by_site(one_site: OneSite, dtype: torch.dtype) -> Method:
    """A method that rounds the linears of one input after another. What ``one_site`` holds goes when it ends, so that
    nothing of a site lies beside the next. ``dtype``: what all else is stored as."""

    def run(
        sites: Sequence[Site], weights: Mapping[str, Tensor], grams: Callable[[str], Gram | None]
    ) -> Iterator[Made]:
        folded = Folded(weights)

        def made() -> Iterator[Made]:
            for site in reversed(sites):
                yield from one_site(site, weights, folded, grams(site.name))
            yield from stay_dense(sites, folded, dtype)

        for one in made():  # what comes behind a linear has been folded into it by now, and its own input's scale
            yield one if len(one.value.shape) == 1 else replace(one, scales=folded.scales(one.name))

    return run


def stay_dense(sites: Sequence[Site], weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[Made]:
    """All that is not quantized in a layer, as ``dtype``: norms, biases, routers, gates and skipped linears."""
    quantized = {x.name for site in sites for x in site.linears}
    followers = {x.name for site in sites for x in site.followers}
    for name in weights:
        if name not in quantized:
            value = weights[name].to(dtype).cpu()
            yield Made(name, Dense(value) if name in followers else value)


MOST = 20  # lines of a result that name single linears


def warnings(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every linear (of ``quality``'s ``layers``) that calibration said nothing or not all about; after
    ``MOST`` of them one that counts the rest."""
    found = []
    for layer in layers:
        name, dead = layer["name"], layer.get("dead_inputs", 0)
        if layer["method"] == "weight-only":
            found.append(f"{name}: no calibration token reached it; quantized by its weights alone")
        elif dead:
            inputs = "1 input was" if dead == 1 else f"{dead} inputs were"
            found.append(f"{name}: {inputs} always zero in calibration; their weights count alone")
    rest = len(found) - MOST
    return found if rest <= 0 else [*found[:MOST], f"and {rest} more linears; manifest.json has them under quality"]


def to_state(made: Iterable[Made]) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
    """(a stream of tensors, JSON values that are whole when it has ended) from which ``from_state`` restores what was
    made bit for bit."""
    forms: dict[str, dict[str, Any]] = {}
    reports: list[dict[str, Any]] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for one in made:
            if one.report is not None:
                reports.append(dataclasses.asdict(one.report))
            forms[one.name] = {"form": type(one.value).__name__}
            for key, vector in (("columns", one.scales.columns), ("divisors", one.scales.divisors)):
                if vector is not None:
                    yield f"{one.name}:{FOLDED}{key}", vector.float().cpu().contiguous()
            if isinstance(one.value, Tensor):
                forms[one.name]["form"] = "Tensor"  # parameters are a class of their own
                yield one.name, one.value
                continue
            for field in dataclasses.fields(one.value):
                content = getattr(one.value, field.name)
                if isinstance(content, Tensor):
                    yield f"{one.name}:{field.name}", content
                elif isinstance(content, SuperScales):
                    for part in dataclasses.fields(content):
                        if (inner := getattr(content, part.name)) is not None:
                            yield f"{one.name}:{field.name}.{part.name}", inner
                else:
                    forms[one.name][field.name] = content

    return tensors(), {"forms": forms, "reports": reports}


def from_state(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> LayerResult:
    """Inverse of ``to_state``; a parameter's ``tensors`` are asked for when it is."""
    parts: dict[str, list[str]] = {name: [] for name in meta["forms"]}
    scales: dict[str, dict[str, Tensor]] = {}
    for key in tensors:
        name, _, part = key.partition(":")
        if part.startswith(FOLDED):
            scales.setdefault(name, {})[part.removeprefix(FOLDED)] = tensors[key]
        else:
            parts[name].append(key)

    def make(name: str) -> Weight | Tensor:
        form = meta["forms"][name]
        if form["form"] == "Tensor":
            return tensors[name]
        fields = {k: v for k, v in form.items() if k != "form"}
        fields |= {key.partition(":")[2]: tensors[key] for key in parts[name]}
        supers = {k.split(".")[1]: fields.pop(k) for k in list(fields) if k.startswith("super_scales.")}
        if supers:
            fields["super_scales"] = SuperScales(**supers)
        if "block" in fields:
            fields["block"] = tuple(fields["block"])
        return _FORMS[form["form"]](**fields)

    reports = [read(LinearReport, r) for r in meta["reports"]]
    return LayerResult(Lazy(meta["forms"], make), reports, {name: Scales(**own) for name, own in scales.items()})


def storable_bits(value: Weight) -> int:
    """Bits that ``value`` takes in a file: codes, scales and zero points."""
    rows, columns = value.shape
    match value:
        case GroupInt():
            groups = rows * columns // value.group_size
            return rows * columns * value.bits + groups * (value.scales.element_size() * 8 + value.bits)
        case Trellis():
            return rows * columns * value.bits + value.scales.numel() * 16 + 256 * 8
        case ChannelInt8() | Fp8():
            return rows * columns * 8 + rows * 32
        case BlockFp8():
            return rows * columns * 8 + value.scales.numel() * 32
        case Fp4():
            return rows * columns * 4 + value.scales.numel() * 8
        case Dense():
            return rows * columns * torch.finfo(value.weight.dtype).bits
        case _:
            raise AssertionError(f"no method makes {type(value).__name__}")
