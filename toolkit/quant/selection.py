"""Which linears of a model are quantized: all inside the layers, less ``--skip``, or those of ``--include`` alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.models.registry import get, without_head
from toolkit.models.sites import RowFold, Site, layer_sites
from toolkit.models.spec import LayerSpec, LinearSpec, StoredTensor
from toolkit.quant.layers.source import LayerSource


@dataclass(frozen=True)
class Selection:
    """``dense``: canonical names of linears inside layers that stay as they are; ``head``: whether the head is
    quantized too; ``routed``: linears that tokens of pictures have otherwise, whose inputs and rows take no scale: what
    they have stays as it is; ``lenders``: layers whose values others read."""

    dense: frozenset[str] = frozenset()
    head: bool = False
    routed: frozenset[str] = frozenset()
    lenders: tuple[LayerSpec, ...] = ()

    def sites(self, layer: LayerSpec) -> list[Site]:
        """The sites of a layer with a linear to quantize; its other readers follow the site's scale and stay dense."""
        found = []
        for site in layer_sites(layer, layer in self.lenders):
            linears = tuple(x for x in site.linears if x.name not in self.dense)
            left = tuple(x for x in site.linears if x.name in self.dense)
            if linears:
                fold = None if self._meets_routed(site) else site.fold
                found.append(replace(site, linears=linears, followers=site.followers + left, fold=fold))
        return found

    def _meets_routed(self, site: Site) -> bool:
        before = [site.fold.linear] if isinstance(site.fold, RowFold) else []
        return any(x.name in self.routed for x in (*site.linears, *site.followers, *before))


def select(source: LayerSource, skip: Sequence[str] = (), include: Sequence[str] = (), head: bool = False) -> Selection:
    """Apply the patterns (found anywhere in a canonical name or a name on disk) to the linears of ``source``.

    A module that is stored fused is quantized whole or not at all. Raises UsageError for a pattern that is no regular
    expression or fits nothing, a head that the model has not, and where nothing is left to quantize.
    """
    spec = source.spec
    if head and (spec.encodes or without_head(source.checkpoint.config, get(spec.family))):
        raise UsageError(f"--quantize-lm-head: {source.path} writes no text and has no head; leave the option out")
    modules = [item for items in source.stored for item in items if item.kind == "linear"]
    skipped, included = _fitting("--skip", skip, modules), _fitting("--include", include, modules)
    dense = {
        part.name
        for item in modules
        if item.name in skipped or (include and item.name not in included)
        for part in item.parts
    }
    if not head and all(x.name in dense for x in source.quantizable()):
        raise UsageError("--skip, --include: no linear is left to quantize; leave some of them out")
    routed = () if spec.vision is None else spec.vision.routed
    lenders = tuple(spec.layers[i] for i in spec.lenders())
    return Selection(frozenset(dense), head, frozenset(one.linear for one in routed), lenders)


def _fitting(option: str, patterns: Sequence[str], modules: Sequence[StoredTensor]) -> set[str]:
    """Names on disk of the modules that one of the patterns fits."""
    found: set[str] = set()
    for pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{option} {pattern!r}: not a regular expression: {error}") from error
        now = {
            item.name for item in modules if any(compiled.search(n) for n in (item.name, *(p.name for p in item.parts)))
        }
        if not now:
            example = modules[0].parts[0].name
            raise UsageError(f"{option} {pattern!r}: fits no linear of this model; names look like {example}")
        found |= now
    return found


def head_site(source: LayerSource) -> Site:
    """The head as a site of its own, its input the final norm's output."""
    spec = source.spec
    head = LinearSpec(spec.head, spec.hidden_size, spec.head_size, bias=spec.head_bias)
    return Site(spec.head, spec.hidden_size, (head,), (), None)
