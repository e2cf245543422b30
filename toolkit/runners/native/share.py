"""What of a model one of several ranks computes: rows of every linear, in tiles, and whole heads, decided from the spec
and from how the weights are packed. No sum is cut, so ranks together give the bits that one process gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import (
    AttentionSpec,
    CrossSpec,
    DecoderSpec,
    DeltaSpec,
    LatentSpec,
    LinearSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    PerLayerSpec,
    ReuseSpec,
    ShortConvSpec,
    portion,
)
from toolkit.runners.native.packing.packed import INT, LANES, PackedTensor

STRIPE = 256  # of workspace.h: the longest group in which a gated product is quantized where it is made


class Tiles(NamedTuple):
    """Of a matrix, [first, last)."""

    first: int
    last: int


class Heads(NamedTuple):
    """Of queries and of the keys that they read, counted."""

    first: int
    number: int
    first_kv: int
    kv_number: int


@dataclass(frozen=True)
class Share:
    """Rank ``rank`` of ``ranks``; ``file``: descriptor of the memory in which they meet. ``lends``: the LM head is held
    whole, since a draft head borrows it."""

    rank: int = 0
    ranks: int = 1
    file: int = -1
    lends: bool = False

    def portion(self, size: int, unit: int = 1) -> tuple[int, int]:
        """(start, stop) of this rank's part of ``size``."""
        return portion(size, self.rank, self.ranks, unit)

    def tiles(self, rows: int, unit: int = 1) -> Tiles:
        """Of a matrix with so many rows, in units of so many tiles."""
        return Tiles(*self.portion(-(-rows // LANES), unit))

    def heads(self, heads: int, kv_heads: int) -> Heads:
        """Whole heads of keys with all that read them. Where there are fewer than ranks, several ranks have the same
        one, and each a part of those that read it."""
        per = heads // kv_heads
        assert heads >= self.ranks
        if kv_heads >= self.ranks:
            start, stop = self.portion(kv_heads)
            return Heads(start * per, (stop - start) * per, start, stop - start)
        of = [rank * kv_heads // self.ranks for rank in range(self.ranks)]
        mine = of[self.rank]
        start, stop = portion(per, self.rank - of.index(mine), of.count(mine))
        return Heads(mine * per + start, stop - start, mine, 1)

    def kept(self, heads: int) -> int:
        """How many heads this rank keeps in its cache."""
        start, stop = self.portion(heads)
        return max(1, stop - start)


def unsupported(spec: DecoderSpec, ranks: int) -> str | None:
    """Why the native runner cannot split the model over so many ranks, or None."""
    if spec.encodes:
        return "encoders run in one process"
    for layer, mixer in spec.mixers():
        count, what = _least(mixer)
        if count < ranks:
            return f"layer {layer}: {count} {what} are fewer than {ranks} ranks; up to {count} would do"
    return None


def _least(mixer: Any) -> tuple[int, str]:
    """Of what is shared out whole the fewest, and what that is."""
    if mixer.kind in ("attention", "reuse", "latent", "cross", "mamba"):
        return mixer.heads, "heads"
    if mixer.kind == "delta":
        return mixer.k_heads, "heads of keys"
    return 1 << 30, "tiles"


def rows(first: int, count: int) -> Tiles:
    """The tiles that hold them."""
    return Tiles(first // LANES, -(-(first + count) // LANES))


class Parts:
    """``tiles``: what a rank computes of linears by name, of those that are not there all. ``codes``: of ``o`` and
    ``down`` by name whether what they read travels in integers. ``weights``: packed, or what tells how they will be."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, PackedTensor], share: Share) -> None:
        self.share, self._weights = share, weights
        self._whole = {spec.head} if share.lends else set()
        self.tiles: dict[str, Tiles] = {}
        self.codes: dict[str, bool] = {}
        if share.ranks == 1:
            return
        for _, mixer in spec.mixers():
            getattr(self, f"_{mixer.kind}")(mixer)
        if not spec.tied:
            self.tiles[spec.head] = share.tiles(spec.head_size)
        self.head = share.tiles(spec.head_size)

    def _attention(self, a: AttentionSpec) -> None:
        found = self.share.heads(a.heads, a.kv_heads)
        own, keys = (rows(first * a.head_dim, count * a.head_dim) for first, count in (found[:2], found[2:]))
        if not _wide(a.q_norm, a):
            self.tiles[a.q.name] = own
        if not _wide(a.k_norm, a):
            self.tiles[a.k.name] = keys
        if a.v != a.k:
            self.tiles[a.v.name] = keys
        if a.gate is not None:
            self.tiles[a.gate.name] = own
        self._heads_end(a.o, [other.heads(a.heads, a.kv_heads).first * a.head_dim for other in self._all()])
        self.codes[a.o.name] &= a.o_norm is None  # which is over what all ranks have

    def _reuse(self, m: ReuseSpec) -> None:
        found = self.share.heads(m.heads, m.kv_heads)
        self.tiles[m.q.name] = rows(found.first * m.head_dim, found.number * m.head_dim)
        self._heads_end(m.o, [other.heads(m.heads, m.kv_heads).first * m.head_dim for other in self._all()])

    def _per_layer(self, m: PerLayerSpec) -> None:
        self.tiles[m.gate.name] = self.share.tiles(m.gate.out_features)
        self._ends(m.down)

    def _cross(self, c: CrossSpec) -> None:
        found = self.share.heads(c.heads, c.kv_heads)
        self.tiles[c.q.name] = rows(found.first * c.head_dim, found.number * c.head_dim)
        for linear in (c.k, c.v):
            self.tiles[linear.name] = rows(found.first_kv * c.head_dim, found.kv_number * c.head_dim)
        self._heads_end(c.o, [other.heads(c.heads, c.kv_heads).first * c.head_dim for other in self._all()])

    def _latent(self, a: LatentSpec) -> None:
        """What all heads read is computed by all ranks; of kv_b, which lies by heads too, each reads its own."""
        start, stop = self.share.portion(a.heads)
        self.tiles[a.q.name] = rows(start * (a.nope_dim + a.rope_dim), (stop - start) * (a.nope_dim + a.rope_dim))
        self.tiles[a.kv_b.name] = rows(start * (a.nope_dim + a.v_dim), (stop - start) * (a.nope_dim + a.v_dim))
        self._heads_end(a.o, [other.portion(a.heads)[0] * a.v_dim for other in self._all()])

    def _short_conv(self, m: ShortConvSpec) -> None:
        for linear in (m.b, m.c, m.value):
            self.tiles[linear.name] = self.share.tiles(m.conv.channels)
        self._ends(m.out)

    def _delta(self, m: DeltaSpec) -> None:
        start, stop = self.state_heads(m)
        self.tiles[m.z.name] = rows(start * m.v_dim, (stop - start) * m.v_dim)
        self._ends(m.out)

    def _mamba(self, m: MambaSpec) -> None:
        start, stop = self.state_heads(m)
        if not (m.norm_first and self.norms_apart(m)):
            self.tiles[m.z.name] = rows(start * m.head_dim, (stop - start) * m.head_dim)
        self._ends(m.out)

    def state_heads(self, m: Any) -> tuple[int, int]:
        """Heads of a state, (start, stop): whole groups, where they are enough."""
        groups = m.k_heads if m.kind == "delta" else m.heads if self.norms_apart(m) else m.groups
        start, stop = self.share.portion(groups)
        return start * m.heads // groups, stop * m.heads // groups

    def norms_apart(self, m: MambaSpec) -> bool:
        """Whether what is normed together is of several ranks."""
        return m.groups < self.share.ranks

    def _mlp(self, m: MlpSpec) -> None:
        self._experts([m])

    def _moe(self, m: MoeSpec) -> None:
        each = [self._experts(m.experts), *([] if m.shared is None else [self._experts([m.shared])])]
        self.codes[m.router.name] = all(each)

    def _experts(self, mlps: Sequence[MlpSpec]) -> bool:
        """MLPs that are cut alike; whether what `down` reads travels in integers."""
        groups, width = {self._group(m.down) for m in mlps}, mlps[0].up.out_features
        group = groups.pop() if len(groups) == 1 else None
        units = 0 if group is None or group > STRIPE else width // group
        codes = (
            mlps[0].inner_norm is None
            and units > 0
            and (units >= 8 * self.share.ranks or units % self.share.ranks == 0)
        )
        own = self.share.tiles(width, group // LANES if group and codes else 1)
        for m in mlps:
            self.codes[m.down.name] = codes
            self.tiles |= dict.fromkeys((linear.name for linear in m.readers()), own)
            self._ends(m.down)
        return codes

    def _all(self) -> list[Share]:
        return [Share(rank, self.share.ranks) for rank in range(self.share.ranks)]

    def _heads_end(self, linear: LinearSpec, borders: list[int]) -> None:
        """``borders``: where the inputs begin that ranks make."""
        group = self._group(linear)
        self.codes[linear.name] = group is not None and all(at % group == 0 for at in borders)
        self._ends(linear)

    def _ends(self, linear: LinearSpec) -> None:
        self.tiles[linear.name] = self.share.tiles(linear.out_features)

    def _group(self, linear: LinearSpec) -> int | None:
        """By which it quantizes its inputs in their order, or None."""
        packed = self._weights[linear.name]
        return packed.meta.group if packed.meta.kind == INT and packed.perm is None else None

    def kept(self, name: str, tensor: PackedTensor) -> PackedTensor:
        """The tensor with memory for this rank's tiles alone: others are never read."""
        found = self.tiles.get(name)
        if found is None or name in self._whole:
            return tensor
        own = slice(found.first * tensor.meta.tile_bytes, found.last * tensor.meta.tile_bytes)
        data = np.empty(tensor.meta.nbytes, np.uint8)  # pages come when they are written
        data[own] = tensor.data[own]
        return PackedTensor(data, tensor.meta, tensor.perm)

    def bytes_of(self, name: str, tensor: PackedTensor) -> int:
        """How much of it this rank holds."""
        found = None if name in self._whole else self.tiles.get(name)
        return tensor.meta.nbytes if found is None else (found.last - found.first) * tensor.meta.tile_bytes


def _wide(norm: Any, a: AttentionSpec) -> bool:
    """Whether it spans all heads, which the rank then needs."""
    return norm is not None and norm.size > a.head_dim
