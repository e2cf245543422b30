"""Adapters of the native runner: packed for the library, and which of them are in memory."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError
from toolkit.runners.native import library
from toolkit.runners.native.packing.packed import VECTOR, PackedMeta, PackedTensor, vector

if TYPE_CHECKING:
    from toolkit.artifacts.adapter import Change

ABSENT = PackedTensor(np.zeros(0, np.uint8), PackedMeta(VECTOR, 0))
Slots = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class PackedAdapter:
    """``sites``: int32, of the linears that it changes; ``tensors``: four of each, see ``AdapterTable::put``."""

    sites: Slots
    tensors: tuple[PackedTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.data.nbytes for t in self.tensors)


def pack_adapter(
    changes: Mapping[str, Change], spec: DecoderSpec, sites: Mapping[str, int], dtype: str, turned: bool
) -> PackedAdapter:
    """``dtype``: of its matrices; ``turned``: the head is turned by a Hadamard matrix. Imports torch."""
    import torch

    from toolkit.artifacts.adapter import Whole
    from toolkit.runners.native.packing.head import turn
    from toolkit.runners.native.packing.pack import pack_dense

    kind = getattr(torch, dtype)

    def packed(matrix: Any) -> PackedTensor:
        return pack_dense(matrix.to(kind).contiguous()).in_memory()

    tensors: list[PackedTensor] = []
    for name, change in changes.items():
        reads_turned = turned and name == spec.head
        if isinstance(change, Whole):
            tensors += [ABSENT, ABSENT, ABSENT, packed(turn(change.weight) if reads_turned else change.weight)]
            continue
        a = change.a.T if name == spec.embed else turn(change.a) if reads_turned else change.a
        size = ABSENT if change.magnitude is None else vector(change.magnitude.numpy())
        tensors += [packed(a), packed(change.b), size, ABSENT]
    return PackedAdapter(np.array([sites[name] for name in changes], np.int32), tuple(tensors))


class Shelf:
    """The adapters of a model by their numbers, of which as many are in memory as ``limit`` bytes hold (0 = any): those
    used last. ``read``: packs one. ``put``, ``drop``: into and out of the library, between steps.

    An adapter that a step needs is read where it is not there, and what was used longest ago makes room for it; those
    of the step itself stay, whatever the limit.
    """

    def __init__(
        self,
        read: Callable[[int], PackedAdapter],
        put: Callable[[int, PackedAdapter], None],
        drop: Callable[[int], None],
        limit: int = 0,
    ) -> None:
        self._read, self._put, self._drop, self._limit = read, put, drop, limit
        self._held: OrderedDict[int, PackedAdapter] = OrderedDict()  # used last comes last
        self.reads = 0

    @property
    def nbytes(self) -> int:
        """What those in memory take."""
        return sum(adapter.nbytes for adapter in self._held.values())

    @property
    def held(self) -> list[int]:
        """Numbers of those in memory, used longest ago first."""
        return list(self._held)

    def need(self, numbers: Sequence[int]) -> None:
        """Have these in memory. ToolkitError passes through where one cannot be read."""
        wanted = set(numbers)
        for number in sorted(wanted):
            if number not in self._held:
                adapter = self._read(number)
                self._make_room(adapter.nbytes, wanted)
                self._put(number, adapter)
                self._held[number] = adapter
                self.reads += 1
            self._held.move_to_end(number)

    def forget(self, number: int) -> None:
        """Give back what it takes."""
        if self._held.pop(number, None) is not None:
            self._drop(number)

    def _make_room(self, size: int, stay: set[int]) -> None:
        if not self._limit:
            return
        for number in [n for n in self._held if n not in stay]:
            if self.nbytes + size <= self._limit:
                break
            self.forget(number)


def put_adapter(lib: ctypes.CDLL, model: int, slot: int, adapter: PackedAdapter) -> None:
    """Raises RunnerError where it does not fit the model."""
    records = library.tensor_records(adapter.tensors)
    if lib.tk_adapter_put(model, slot, library.address(adapter.sites), records, len(adapter.sites)):
        raise RunnerError(library.error(lib))
