"""Where a layer can be scaled: which linears share an input, and what a scale on that input folds into.

A *site* is one tensor of activations that one or more linears read. Dividing it by ``s`` (a positive number a
channel) and multiplying the linears' columns by ``s`` changes nothing; the division is folded into the operation that
produced the activations: the norm before (its weight), the value projection (its rows: the softmax mixes tokens, never
channels), or the up projection of a gated MLP (its rows: the gate multiplies channel by channel).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from toolkit.models.spec import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, MoeSpec, NormSpec


@dataclass(frozen=True)
class NormFold:
    """Divide ``norm``'s effective weight, ``weight + weight_offset``."""

    norm: NormSpec


@dataclass(frozen=True)
class RowFold:
    """Divide the rows (and bias) of ``linear``.

    Its row ``h * width + d`` feeds the site's channels ``(h * repeat + r) * width + d`` for every r < repeat: under
    grouped-query attention ``repeat`` query heads read one kv head, so they share its scale. ``repeat`` 1: one to one.
    """

    linear: LinearSpec
    width: int = 1
    repeat: int = 1


Fold = NormFold | RowFold


@dataclass(frozen=True)
class Site:
    """One input of ``size`` channels, observed under ``name`` (see ``forward.layer_forward``).

    ``linears`` read it and are quantized; ``followers`` (a MoE's router and shared gate) read it and stay as they are.
    ``fold`` None: what comes before cannot take a scale, so the site is quantized unscaled.
    """

    name: str
    size: int
    linears: tuple[LinearSpec, ...]
    followers: tuple[LinearSpec, ...]
    fold: Fold | None


def layer_sites(layer: LayerSpec) -> list[Site]:
    """The sites of a layer in execution order."""
    found: list[Site] = []
    for sub in layer.sublayers:
        fold = NormFold(sub.pre_norm) if sub.pre_norm is not None else None
        match sub.mixer:
            case AttentionSpec() as a:
                found.append(Site(a.q.name, a.q.in_features, (a.q, a.k, a.v), (), fold))
                into = RowFold(a.v, width=a.head_dim, repeat=a.heads // a.kv_heads)
                found.append(Site(a.o.name, a.o.in_features, (a.o,), (), into))
            case MlpSpec() as m:
                found.append(Site(m.up.name, m.up.in_features, _entry(m), (), fold))
                found.append(_down_site(m))
            case MoeSpec() as m:
                blocks = [*m.experts, *([m.shared] if m.shared else [])]
                entry = tuple(x for b in blocks for x in _entry(b))
                followers = (m.router, *([m.shared_gate] if m.shared_gate else []))
                found.append(Site(m.router.name, m.router.in_features, entry, followers, fold))
                found.extend(_down_site(b) for b in blocks)
    return found


def modules(linears: Iterable[LinearSpec]) -> list[list[LinearSpec]]:
    """Linears that follow each other and belong to one attention block, MLP or expert, together."""
    return [list(group) for _, group in groupby(linears, key=lambda x: x.name.rpartition(".")[0])]


def _entry(m: MlpSpec) -> tuple[LinearSpec, ...]:
    return (m.up,) if m.gate is None else (m.gate, m.up)


def _down_site(m: MlpSpec) -> Site:
    gated = m.gate is not None or m.activation == "relu"  # relu(x / s) = relu(x) / s
    return Site(m.down.name, m.down.in_features, (m.down,), (), RowFold(m.up) if gated else None)
