"""Moving a scale from one side of a site to the other without changing the function.

``fold`` divides what produces the site's activations by ``s`` and multiplies every linear that reads them by ``s``.
In exact arithmetic nothing changes; so that nothing changes in the stored dtype either, the scale is first replaced by
the one that the *rounded* norm weight implies (``storable``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.artifacts.scales import Scales
from toolkit.base.named import Named
from toolkit.models.sites import Fold, NormFold, RowFold, Site


def expand(fold: Fold, scale: Tensor) -> Tensor:
    """Scale of each producing row [kv_heads · width] → of each channel of the site [heads · width]. Of a NormFold they
    are the same."""
    if isinstance(fold, NormFold):
        return scale
    return scale.view(-1, 1, fold.width).expand(-1, fold.repeat, -1).reshape(-1)


def shrink(fold: Fold, per_channel: Tensor) -> Tensor:
    """Mean over the channels that share a producing row: [heads · width] → [kv_heads · width]."""
    if isinstance(fold, NormFold):
        return per_channel
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


class Folded(Named[Tensor]):
    """Weights of a layer (dense float32 by canonical name) with scales folded in whenever one is asked for."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__(weights)
        self.weights = weights
        self.norms: dict[str, Tensor] = {}
        self.columns: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.changes: dict[str, Tensor] = {}  # that are added before scales

    def __getitem__(self, name: str) -> Tensor:
        if name in self.norms:
            return self.norms[name]
        value = self.weights[name]
        if name in self.changes:
            value = value + self.changes[name]
        if name in self.columns:
            value = value * self.columns[name]
        return value / self.rows[name] if name in self.rows else value

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def scales(self, name: str) -> Scales:
        """What has been folded into a linear."""
        return Scales(self.columns.get(name), self.rows.get(name))


def fold_site(site: Site, weights: Folded, scale: Tensor) -> Tensor:
    """Fold ``scale`` into ``weights``.

    ``scale``: [site.size] for a NormFold, [rows of the producer that feed the site] for a RowFold. Returns the scale of
    each site channel.
    """
    match site.fold:
        case NormFold(norm):
            effective = weights[norm.name] + norm.weight_offset
            weights.norms[norm.name] = effective / scale - norm.weight_offset
            if norm.bias:
                weights.norms[f"{norm.name}.bias"] = weights[f"{norm.name}.bias"] / scale
            channels = scale
        case RowFold(linear) as rows:
            divisor = F.pad(scale.view(-1, rows.width), (rows.skip, 0), value=1.0).reshape(-1)
            weights.rows[linear.name] = divisor[:, None]
            if linear.bias:
                weights.rows[f"{linear.name}.bias"] = divisor
            channels = expand(rows, scale)
        case None:
            raise AssertionError(f"{site.name} takes no scale")
    for reader in (*site.linears, *site.followers):
        weights.columns[reader.name] = channels
    return channels
