"""AWQ's scales without a single token: how large the inputs of a linear are is told from the weights before it.

A norm gives each channel a mean square of its weight's square. The rows of a value projection tell how large the inputs
of the output projection are, those of gate and up how large those of down, as if channels were independent and normal.
Scales follow from that as in Lin et al., "AWQ: Activation-aware Weight Quantization" (2023).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense
from toolkit.artifacts.scales import UNSCALED, Scales
from toolkit.base.named import Named
from toolkit.models.routed import ROUTED, routed_tensors
from toolkit.models.sites import NormFold, RowFold, Site, layer_sites
from toolkit.runners.native.packing.rounding import rounding_error, row_squares
from toolkit.runners.weights.folding import Folded, expand, fold_site
from toolkit.runners.weights.info import info_of, reading_ahead, scales_of

if TYPE_CHECKING:
    from toolkit.artifacts.canonical import Weight
    from toolkit.models.spec import DecoderSpec, LayerSpec

POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the size of an input: the scale whose expected error is least is taken
SAMPLED = 128  # rows of all linears of a site that are rounded to find it
REACH = 2.0**-12  # smallest scale of a site, of its largest


class ScaledWeights(Named["Weight | Tensor"]):
    """``weights`` of ``spec`` scaled so that rounding to 4 bits in groups of ``group`` loses less, what a scale may
    change in float32.

    A layer is looked at when one of its weights is first asked for. What is no float matrix stays as it is, and so does
    what shares its inputs.
    """

    def __init__(self, weights: Mapping[str, Weight | Tensor], spec: DecoderSpec, group: int) -> None:
        super().__init__(weights)
        self._weights = weights
        lenders = spec.lenders()
        self._layers = [(layer, layer_sites(layer, i in lenders)) for i, layer in enumerate(spec.layers)]
        self._layer_of = {name: i for i, (_, sites) in enumerate(self._layers) for s in sites for name in _touched(s)}
        routed = () if spec.vision is None else spec.vision.routed
        self._shapes = {n: x for n, x in routed_tensors(routed).items() if _linear_of(n) in self._layer_of}
        self._folded = cache(lambda i: _fold(*self._layers[i], weights, group))

    def __getitem__(self, name: str) -> Weight | Tensor:
        found = self._weights[name]
        if name in self._shapes:
            return self._folded_beside(name, found)
        if name not in self._layer_of or not isinstance(found, Dense | Tensor):
            return found
        folded = self._folded(self._layer_of[name])[name]
        return Dense(folded) if isinstance(found, Dense) else folded

    def _folded_beside(self, name: str, found: Weight | Tensor) -> Tensor:
        """What tokens of pictures have in place of a linear or beside it, which reads the same, in the type that it is
        stored in: it may be as large as the model."""
        linear = _linear_of(name)
        own = self._folded(self._layer_of[linear]).scales(linear)
        stored = found if isinstance(found, Tensor) else found.dequantize()
        rows = stored.float().reshape(self._shapes[name])
        if name.endswith(".bias"):
            rows = rows if own.divisors is None else rows / own.divisors.reshape(-1)
        else:
            columns, divisors = own.columns, own.divisors
            rows = Scales(None if name.endswith(".b") else columns, None if name.endswith(".a") else divisors)(rows)
        return rows.to(stored.dtype)

    def parts(self, name: str) -> tuple[Weight | Tensor, Scales | None]:
        """A linear as it is stored, and what makes some of its rows those of ``self[name]``: whole matrices in float32
        are not made, whose memory the system would take longer to clear than rounding does."""
        found = self._weights[name]
        if name not in self._layer_of:
            return found, None
        return found, self._folded(self._layer_of[name]).scales(name)

    def scales(self) -> dict[str, Scales]:
        """By which adapters of what ``weights`` were made of are changed: of linears that have any."""
        before = scales_of(self._weights) or {}
        found = dict(before)
        for i, (layer, _) in enumerate(self._layers):
            for x in layer.linears():
                own = self._folded(i).scales(x.name)
                if own:
                    found[x.name] = own.after(before.get(x.name, UNSCALED))
        return found

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as headers tell it: its matrices may be without memory."""
        found = info_of(self._weights, name)
        if name in self._shapes:
            dtype = found.dtype if isinstance(found, Tensor) else torch.float32
            return torch.empty(self._shapes[name], dtype=dtype, device="meta")
        if name not in self._layer_of or not isinstance(found, Dense | Tensor):
            return found
        return Dense(found.weight.float()) if isinstance(found, Dense) else found.float()

    def reading_ahead(self, names: Container[str]) -> AbstractContextManager[None]:
        """While those called ``names`` are asked for, best once and in their order, the next ones are read."""
        return reading_ahead(self._weights, names)


def _linear_of(routed: str) -> str:
    """The linear that a tensor of pictures' tokens is for."""
    return routed.removeprefix(ROUTED).rpartition(".")[0]


class _Floats(Named[Tensor]):
    """Float weights and vectors in float32."""

    def __init__(self, weights: Mapping[str, Weight | Tensor]) -> None:
        super().__init__(weights)
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        found = self._weights[name]
        return (found if isinstance(found, Tensor) else found.dequantize()).float()

    def row_squares(self, name: str, sizes: Tensor | None) -> Tensor:
        """``row_squares`` of a matrix, which is not made float32 for it."""
        found = self._weights[name]
        return row_squares(found.weight if isinstance(found, Dense) else self[name], sizes)


def _touched(site: Site) -> list[str]:
    """What a scale of ``site`` may change."""
    if site.fold is None:
        return []
    before = (site.fold.norm if isinstance(site.fold, NormFold) else site.fold.linear).name
    return [before, f"{before}.bias", *(x.name for x in (*site.linears, *site.followers))]


def _fold(layer: LayerSpec, sites: list[Site], weights: Mapping[str, Weight | Tensor], group: int) -> Folded:
    """The layer with a scale folded into each site that takes one."""
    floats = _Floats(weights)
    folded = Folded(floats)
    gates = {m.up.name: m.gate.name for s in layer.sublayers for m in s.mixer.mlps() if m.gate is not None}
    sizes: dict[str, Tensor] = {}  # by linear: the mean square of each of its inputs
    for site in sites:
        if not _takes_scale(site, weights, group):
            continue
        made = _made(site, floats, sizes, gates)
        size = expand(site.fold, made) if isinstance(site.fold, RowFold) else made
        sizes |= {reader.name: size for reader in site.linears}
        power = _best_power(_sample(site, weights), size, group)
        fold_site(site, folded, _scale(made, power))
    return folded


def _takes_scale(site: Site, weights: Mapping[str, Weight | Tensor], group: int) -> bool:
    names = [x.name for x in (*site.linears, *site.followers)]
    if isinstance(site.fold, RowFold):
        names.append(site.fold.linear.name)
    dense = all(isinstance(info_of(weights, name), Dense) for name in names)
    return site.fold is not None and dense and site.size % group == 0


def _made(site: Site, floats: _Floats, sizes: Mapping[str, Tensor], gates: Mapping[str, str]) -> Tensor:
    """The mean square of each channel that ``site.fold`` makes, or of each row; of an unknown input it counts as 1."""

    def rows(name: str) -> Tensor:
        return floats.row_squares(name, sizes.get(linear))

    if isinstance(site.fold, NormFold):
        return (floats[site.fold.norm.name] + site.fold.norm.weight_offset).square()
    assert site.fold is not None
    linear = site.fold.linear.name
    made = rows(linear) + (floats[f"{linear}.bias"].square() if site.fold.linear.bias else 0.0)
    made = made * _activated(rows(gates[linear])) if linear in gates else made
    return made.view(-1, site.fold.skip + site.fold.width)[:, site.fold.skip :].reshape(-1)


def _activated(size: Tensor) -> Tensor:
    """The mean square of SiLU, which stands for all smooth gates, of normal numbers whose mean square is ``size``."""
    at = torch.linspace(-4, 4, 41)
    share = torch.softmax(-at * at / 2, 0)
    return torch.nn.functional.silu(size.sqrt()[:, None] * at).square() @ share


def _scale(size: Tensor, power: float) -> Tensor:
    """``power`` of the root of ``size``, the geometric mean of the extremes 1."""
    scale = size.sqrt().pow(power)
    scale = scale.clamp(min=float(scale.amax()) * REACH)
    return scale / (scale.amax() * scale.amin()).sqrt()


def _sample(site: Site, weights: Mapping[str, Weight | Tensor]) -> Tensor:
    """Evenly spaced rows of the linears of ``site``, float32, of each as many as of the others."""
    each = max(SAMPLED // len(site.linears), 1)
    found = (weights[x.name] for x in site.linears)
    return torch.cat([w.weight[:: -(-w.shape[0] // each)].float() for w in found if isinstance(w, Dense)])


def _best_power(rows: Tensor, size: Tensor, group: int) -> float:
    """Of ``POWERS`` the one with which rounding ``rows`` changes their outputs least."""

    def error(power: float) -> float:
        return rounding_error(rows, 4, group, _scale(size, power), size)

    return min(POWERS, key=error)
