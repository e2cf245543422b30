"""The tensors of a program, and the records that name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.models.routed import Routed
from toolkit.models.spec import (
    LinearSpec,
    NormSpec,
    RopeSpec,
)
from toolkit.runners.native.packing.packed import PackedTensor, PackedWeights, floats, vector
from toolkit.runners.native.share import Parts

Record = dict[str, Any]


Floats = np.ndarray[Any, np.dtype[np.float32]]


class Tensors:
    """The tensors of a program, ``found``, which records name by their index. KeyError where one is missing. ``sites``:
    linears that adapters may change, by the numbers that they are named by; those that read one input side by side are
    less than 8 apart (``Lowered``).

    ``routed``: what linears are for tokens of pictures. ``parts``: what of them a rank computes, None = all.
    """

    def __init__(
        self,
        weights: PackedWeights,
        ropes: Sequence[RopeSpec] = (),
        routed: Sequence[Routed] = (),
        parts: Parts | None = None,
    ) -> None:
        self.parts = parts
        self._routed = {x.linear: x for x in routed}
        self.sites: dict[str, int] = {}
        self.found: list[PackedTensor] = []
        self.weights = weights
        self._ropes = ropes
        self._index: dict[str, int] = {}
        self._orders: dict[bytes, np.ndarray[Any, np.dtype[np.int32]]] = {}

    def add(self, tensor: PackedTensor) -> int:
        """One that no checkpoint has. Equal orders of columns become one array: by its address the library tells that
        linears quantize their input alike."""
        if tensor.perm is not None:
            one = self._orders.setdefault(tensor.perm.tobytes(), tensor.perm)
            tensor = replace(tensor, perm=one)
        self.found.append(tensor)
        return len(self.found) - 1

    def numbers(self, values: Any) -> int:
        """The same, of float32 values."""
        return self.add(vector(np.asarray(values, np.float32)))

    def named(self, name: str) -> int:
        """That of the weights."""
        if name not in self._index:
            self._index[name] = self.add(self.weights[name])
        return self._index[name]

    def place(self, name: str) -> int | None:
        """Where that of the weights is; None = nothing has named it."""
        return self._index.get(name)

    def stored(self, name: str) -> Floats:
        """The numbers of a vector among the weights."""
        found = self.weights[name]
        return found.data.view(np.float32)[: found.meta.rows]

    def matrix(self, name: str, bias: str | None) -> Record:
        """A matrix and, where it has a name, its bias."""
        return {"matrix": self.named(name), "bias": None if bias is None else self.named(bias)}

    def linear(self, linear: LinearSpec | None) -> Record | None:
        """As ``matrix``, where there is one."""
        if linear is None:
            return None
        made = self.matrix(linear.name, f"{linear.name}.bias" if linear.bias else None)
        own = None if self.parts is None else self.parts.tiles.get(linear.name)
        return made | {
            "site": self.site(linear.name),
            "seen": self._seen(self._routed.get(linear.name)),
            "own": None if own is None else own._asdict(),
        }

    def linears(self, **linears: LinearSpec | None) -> Record:
        """Linears under the names of their fields."""
        return {name: self.linear(linear) for name, linear in linears.items()}

    def codes(self, linear: LinearSpec) -> bool | None:
        """Whether ranks hand on what it reads in integers; None = there are no others."""
        return None if self.parts is None else self.parts.codes.get(linear.name)

    def own_heads(self, a: Any) -> Record | None:
        """Those of a rank."""
        if self.parts is None:
            return None
        if a.kind == "latent":
            start, stop = self.parts.share.portion(a.heads)
            return {"first_head": start, "heads": stop - start, "codes": self.codes(a.o)}
        found = self.parts.share.heads(a.heads, a.kv_heads)
        return {
            "first_head": found.first,
            "heads": found.number,
            "first_kv_head": found.first_kv,
            "kv_heads": found.kv_number,
            "codes": self.codes(a.o),
        }

    def own_states(self, m: Any) -> Record | None:
        """Heads of a state that are a rank's."""
        if self.parts is None:
            return None
        start, stop = self.parts.state_heads(m)
        return {"first": start, "last": stop}

    def site(self, name: str) -> int:
        """That of a linear, or of embedding or head."""
        return self.sites.setdefault(name, len(self.sites))

    def _seen(self, routed: Routed | None) -> Record | None:
        """What it is for tokens of pictures."""
        if routed is None:
            return None
        if routed.rank:
            low = {x: {"matrix": self.named(f"{routed.name}.{x}")} for x in "ab"}
            return {**low, "scale": routed.scale}
        bias = self.numbers(floats(self.weights[f"{routed.name}.bias"])) if routed.bias else None
        return {"whole": {"matrix": self.named(f"{routed.name}.weight"), "bias": bias}}

    def norm(self, norm: NormSpec | None) -> Record | None:
        """A norm, where there is one."""
        if norm is None:
            return None
        return {
            "size": norm.size,
            "sets": norm.heads,
            "layer": norm.kind == "layer",
            "weight": self._norm_weight(norm),
            "bias": self.named(f"{norm.name}.bias") if norm.bias else None,
            "eps": norm.eps,
        }

    def _norm_weight(self, norm: NormSpec) -> int:
        if not norm.weight:
            return self.numbers(np.ones(norm.size))
        if norm.weight_offset == 0:
            return self.named(norm.name)
        return self.numbers(self.stored(norm.name) + np.float32(norm.weight_offset))

    def rope(self, rope: RopeSpec | None) -> int | None:
        """Its index among the program's."""
        return None if rope is None else self._ropes.index(rope)
