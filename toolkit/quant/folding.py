"""Moving a scale from one side of a site to the other without changing the function.

``fold`` divides what produces the site's activations by ``s`` and multiplies every linear that reads them by ``s``.
In exact arithmetic nothing changes; so that nothing changes in the stored dtype either, the scale is first replaced by
the one that the *rounded* norm weight implies (``storable``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.models.spec import LayerSpec
from toolkit.quant.sites import NormFold, RowFold, Site, layer_sites


def expand(fold: RowFold, scale: Tensor) -> Tensor:
    """Scale of each producing row [kv_heads · width] → of each channel of the site [heads · width]."""
    return scale.view(-1, 1, fold.width).expand(-1, fold.repeat, -1).reshape(-1)


def shrink(fold: RowFold, per_channel: Tensor) -> Tensor:
    """Mean over the channels that share a producing row: [heads · width] → [kv_heads · width]."""
    return per_channel.view(-1, fold.repeat, fold.width).mean(1).reshape(-1)


def storable(site: Site, weights: Mapping[str, Tensor], scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale nearest to ``scale`` that folds without rounding when the norm is stored as ``dtype``.

    ``scale``: a positive number a site channel (or a producing row, for a RowFold, which is returned as it is: rows are
    quantized anyway). Channels whose norm weight is zero or would overflow keep scale 1.
    """
    if not isinstance(site.fold, NormFold):
        return scale
    norm = site.fold.norm
    effective = weights[norm.name] + norm.weight_offset
    stored = (effective / scale - norm.weight_offset).to(dtype).float() + norm.weight_offset
    exact = effective / stored
    usable = torch.isfinite(exact) & (exact > 0) & (stored != 0) & (exact / scale - 1).abs().lt(0.1)
    return torch.where(usable, exact, torch.ones_like(exact))


def fold_site(site: Site, weights: dict[str, Tensor], scale: Tensor) -> Tensor:
    """Fold ``scale`` into ``weights`` (dense float32 by canonical name; changed entries are replaced, not mutated).

    ``scale``: [site.size] for a NormFold, [rows of the producer] for a RowFold. Returns the scale of each site channel.
    """
    match site.fold:
        case NormFold(norm):
            effective = weights[norm.name] + norm.weight_offset
            weights[norm.name] = effective / scale - norm.weight_offset
            channels = scale
        case RowFold(linear) as rows:
            weights[linear.name] = weights[linear.name] / scale[:, None]
            if linear.bias:
                weights[f"{linear.name}.bias"] = weights[f"{linear.name}.bias"] / scale
            channels = expand(rows, scale)
        case None:
            raise AssertionError(f"{site.name} takes no scale")
    for reader in (*site.linears, *site.followers):
        weights[reader.name] = weights[reader.name] * channels
    return channels


def fold_layer(layer: LayerSpec, weights: dict[str, Tensor], scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of ``weights`` with the scale of every site in ``scales`` (by site name) folded in."""
    folded = dict(weights)
    for site in layer_sites(layer):
        if site.name in scales:
            fold_site(site, folded, scales[site.name])
    return folded
