"""Where a layer can be scaled: which linears share an input, and what a scale on that input folds into.

A *site* is one tensor of activations that one or more linears read. Dividing it by ``s`` (a positive number a
channel) and multiplying the linears' columns by ``s`` changes nothing; the division is folded into the operation that
produced the activations: the norm before (its weight), the value projection (its rows: the softmax mixes tokens, never
channels), or the up projection of a gated MLP and what a short convolution is multiplied by (their rows: both multiply
channel by channel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import (
    AttentionSpec,
    CrossSpec,
    DeltaSpec,
    LatentSpec,
    LayerSpec,
    LinearSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    ShortConvSpec,
    Sublayer,
)


@dataclass(frozen=True)
class NormFold:
    """Divide ``norm``'s effective weight, ``weight + weight_offset``, and its bias."""

    norm: NormSpec


@dataclass(frozen=True)
class RowFold:
    """Divide the rows (and bias) of ``linear``.

    Its row ``h * (skip + width) + skip + d`` feeds the site's channels ``(h * repeat + r) * width + d`` for every
    r < repeat: under grouped-query attention ``repeat`` query heads read one kv head, so they share its scale.
    ``repeat`` 1: one to one. ``skip``: rows of each head that feed something else, and stay.
    """

    linear: LinearSpec
    width: int = 1
    repeat: int = 1
    skip: int = 0


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


def layer_sites(layer: LayerSpec, lends: bool = False) -> list[Site]:
    """The sites of a layer in execution order; sublayers that share their input have one for it. ``lends``: other
    layers read its values too (``DecoderSpec.lenders``), which therefore take no scale."""
    found: list[Site] = []
    entry = 0
    for i, sub in enumerate(layer.sublayers):
        if layer.shares(i):
            one, more = found[entry], _entry(sub)
            linears, followers = one.linears + more.linears, one.followers + more.followers
            found[entry] = replace(one, linears=linears, followers=followers)
        else:
            entry = len(found)
            found += [_entry(sub)] if sub.mixer.readers() else []
        if sub.mixer.kind in INNER:
            inner = INNER[sub.mixer.kind](sub.mixer)
            lent = lends and sub.mixer.kind == "attention"
            found += [replace(x, fold=None) if lent and isinstance(x.fold, RowFold) else x for x in inner]
        found += [_down_site(m) for m in sub.mixer.mlps()]
    return found


def _entry(sub: Sublayer) -> Site:
    norm = None if sub.carries else sub.pre_norm  # what the stream goes on with takes no scale
    fold = None if norm is None or not norm.weight else NormFold(norm)
    readers = sub.mixer.readers()
    return Site(sub.mixer.input_name(), readers[0].in_features, readers, sub.mixer.routers(), fold)


def _moe_sites(m: MoeSpec) -> list[Site]:
    found = []
    for mlps, norm in m.normed():
        linears = tuple(x for mlp in mlps for x in mlp.readers())
        found.append(Site(linears[0].name, linears[0].in_features, linears, (), NormFold(norm)))
    return found


def _attention_sites(a: AttentionSpec) -> list[Site]:
    into = RowFold(a.v, width=a.head_dim, repeat=a.heads // a.kv_heads)
    alone = a.clip is None and a.v_norm is None and a.v != a.k
    fold: Fold | None = into if alone else None
    if a.o_norm is not None:
        fold = NormFold(a.o_norm) if a.o_norm.weight else None
    return [Site(a.o.name, a.o.in_features, (a.o,), (), fold)]


def _latent_sites(a: LatentSpec) -> list[Site]:
    """What queries and keys with values are made from, each behind a norm of its own, and the heads' values."""
    made = [] if a.q_a_norm is None else [(a.q_a_norm, a.q)]
    made.append((a.kv_a_norm, a.kv_b))
    found = [Site(x.name, x.in_features, (x,), (), NormFold(norm)) for norm, x in made]
    into = RowFold(a.kv_b, width=a.v_dim, skip=a.nope_dim)
    return [*found, Site(a.o.name, a.o.in_features, (a.o,), (), into)]


def _cross_sites(a: CrossSpec) -> list[Site]:
    """No text reaches them: keys and values are made of a tower's rows, which have no norm here."""
    rows = Site(a.k.name, a.k.in_features, (a.k, a.v), (), None)
    return [rows, Site(a.o.name, a.o.in_features, (a.o,), (), None)]


def _out(m: ShortConvSpec | MambaSpec | DeltaSpec, fold: NormFold | RowFold | None) -> list[Site]:
    return [Site(m.out.name, m.out.in_features, (m.out,), (), fold)]


INNER: dict[str, Callable[[Any], list[Site]]] = {
    "attention": _attention_sites,
    "reuse": lambda m: [Site(m.o.name, m.o.in_features, (m.o,), (), None)],  # its values are another layer's
    "latent": _latent_sites,
    "cross": _cross_sites,
    "short_conv": lambda m: _out(m, RowFold(m.c)),
    "mamba": lambda m: _out(m, None if m.norm is None else NormFold(m.norm)),
    "moe": _moe_sites,
    "per_layer": lambda m: [Site(m.down.name, m.down.in_features, (m.down,), (), None)],
    "delta": lambda m: _out(m, None),  # its heads share one norm's weight, which can take no scale of each channel
}
"""By kind of mixer: its sites behind the entry, MLPs apart."""


WRITERS: dict[str, Callable[[Any], LinearSpec | None]] = {
    "attention": lambda m: m.o,
    "reuse": lambda m: m.o,
    "latent": lambda m: m.o,
    "short_conv": lambda m: m.out,
    "mamba": lambda m: m.out,
    "delta": lambda m: m.out,
    "mlp": lambda m: m.down if m.seen is None else None,
    "per_layer": lambda m: m.down,
}
"""By kind of mixer: the linear that its outputs come from."""


def writer(sub: Sublayer) -> LinearSpec | None:
    """The linear whose outputs are what a sublayer adds to the residual stream; None where a norm or a choice of
    experts is between, or texts have no part in it."""
    if sub.post_norm is not None or sub.mixer.kind not in WRITERS:
        return None
    return WRITERS[sub.mixer.kind](sub.mixer)


def writers(layer: LayerSpec) -> list[LinearSpec]:
    """Those of a layer's sublayers."""
    return [found for found in map(writer, layer.sublayers) if found is not None]


def modules(linears: Iterable[LinearSpec]) -> list[list[LinearSpec]]:
    """Linears that follow each other and belong to one attention block, MLP or expert, together."""
    return [list(group) for _, group in groupby(linears, key=lambda x: x.name.rpartition(".")[0])]


def _down_site(m: MlpSpec) -> Site:
    linear = m.activation != "swigluoai" if m.gate is not None else m.activation == "relu"  # relu(x / s) = relu(x) / s
    fold: Fold | None = RowFold(m.up) if linear else None
    if m.inner_norm is not None:
        fold = NormFold(m.inner_norm) if m.inner_norm.weight else None
    return Site(m.down.name, m.down.in_features, (m.down,), (), fold)
