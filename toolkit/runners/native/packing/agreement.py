"""What the executor asks of linears that read one input, so that a packed model always runs.

A gate and its up projection are multiplied together: both are dense or both integers, which then quantize their input
alike. And one input is quantized in at most three ways. Weights that were quantized differently (some skipped, experts
each with an order of columns of their own) are held as bfloat16 where they do not agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from toolkit.artifacts.canonical import Weight
from toolkit.models.spec import DecoderSpec
from toolkit.runners.native.packing.packed import INT, PackedTensor

WAYS = 3  # MAX_KEYS of program.h
Key = tuple[int, bytes]  # group of activations, order of columns


class Agreement:
    """Packed tensors on their way out, in the order in which they came; a gate waits for its up projection.

    ``widen``: makes a weight one that is held as bfloat16, which is told in ``notes``.
    """

    def __init__(self, spec: DecoderSpec, notes: list[str], widen: Callable[[Weight], PackedTensor]) -> None:
        self.notes, self.widen = notes, widen
        self.partner: dict[str, str] = {}
        self.input: dict[str, int] = {}
        self.ways: dict[int, set[Key]] = defaultdict(set)
        self.waiting: dict[str, tuple[Weight, PackedTensor]] = {}
        self.out: dict[str, PackedTensor | None] = {}
        inputs = (linears for _, m in spec.mixers() for linears in m.inputs())
        for i, linears in enumerate(inputs):
            self.input |= dict.fromkeys((x.name for x in linears), i)
        for _, m in spec.mixers():
            for mlp in m.mlps():
                if mlp.gate is not None:
                    self.partner |= {mlp.gate.name: mlp.up.name, mlp.up.name: mlp.gate.name}

    def add(self, name: str, packed: PackedTensor) -> None:
        """Something that nothing else depends on."""
        self.out[name] = packed

    def add_linear(self, name: str, value: Weight, packed: PackedTensor) -> None:
        """A linear of the layers, ``value`` as it was before it was packed."""
        self.waiting[name] = value, packed
        self.out[name] = None
        names = [n for n in (self.partner.get(name), name) if n is not None]
        if all(n in self.waiting for n in names):
            self._settle({n: self.waiting.pop(n) for n in names})

    def take(self, last: bool = False) -> Iterator[tuple[str, PackedTensor]]:
        """What is settled, up to the first that waits; all of it where nothing more comes (``last``)."""
        if last:
            for name in list(self.waiting):
                self._settle({name: self.waiting.pop(name)})
        while self.out:
            name = next(iter(self.out))
            packed = self.out[name]
            if packed is None:
                return
            del self.out[name]
            yield name, packed

    def _settle(self, found: dict[str, tuple[Weight, PackedTensor]]) -> None:
        """Linears that must agree: one alone, or a gate and its up projection."""
        keys = {_key(packed) for _, packed in found.values()}
        agree = len(keys) == 1
        for name, (value, packed) in found.items():
            way = _key(packed)
            ways = self.ways[self.input[name]] if name in self.input else set()
            if way is not None and (not agree or (way not in ways and len(ways) == WAYS)):
                why = "its gate or up projection is quantized otherwise" if not agree else "its input is, in three ways"
                packed = self._widened(name, value, why)
            elif way is not None:
                ways.add(way)
            self.out[name] = packed

    def _widened(self, name: str, value: Weight, why: str) -> PackedTensor:
        self.notes.append(f"{name}: held as bfloat16, for {why}")
        return self.widen(value)


def _key(packed: PackedTensor) -> Key | None:
    """How it quantizes its input; None for a dense one."""
    if packed.meta.kind != INT:
        return None
    return packed.meta.group, b"" if packed.perm is None else packed.perm.tobytes()
