"""Adapters of the native runner: packed for the library, and which of them are in memory."""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_128

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError
from toolkit.runners.native import library
from toolkit.runners.native.packing.packed import INT, VECTOR, PackedMeta, PackedTensor, vector
from toolkit.runners.native.packing.side_by_side import side_by_side

if TYPE_CHECKING:
    import torch

    from toolkit.artifacts.adapters.adapter import Change, LowRank
    from toolkit.runners.native.program import Program

log = logging.getLogger(__name__)
ABSENT = PackedTensor(np.zeros(0, np.uint8), PackedMeta(VECTOR, 0))
Slots = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class PackedAdapter:
    """``sites``: int32, of the linears that it changes; ``tensors``: five of each, see ``AdapterTable::put``."""

    sites: Slots
    tensors: tuple[PackedTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.data.nbytes for t in self.tensors)

    @property
    def digest(self) -> bytes:
        """Of all its numbers."""
        found = xxh3_128(np.ascontiguousarray(self.sites).data)
        for tensor in self.tensors:
            found.update(np.ascontiguousarray(tensor.data).data)
        return found.digest()


def pack_adapter(
    changes: Mapping[str, Change], spec: DecoderSpec, program: Program, dtype: str, known: bool = True
) -> PackedAdapter:
    """``dtype``: of its matrices, but for those beside linears of integers, which have 8 bits. ``known``: whether
    ``changes`` have in them what was folded into the linears, if anything. Imports torch."""
    import torch

    from toolkit.artifacts.adapters.adapter import Whole
    from toolkit.runners.native.packing.head import turn
    from toolkit.runners.native.packing.low_rank import Pair, pack_pairs
    from toolkit.runners.native.packing.pack import pack_alike, pack_dense

    kind = getattr(torch, dtype)
    if not known:
        _warn_of_scaled_rows(changes, program)
    tensors: list[PackedTensor] = []
    low: dict[int, torch.Tensor] = {}  # by their places in ``tensors``
    pairs: dict[int, Pair] = {}
    beside: dict[int, tuple[LowRank, bool]] = {}  # whose pairs these are
    for name, change in changes.items():
        base = program.bases.get(name)
        reads_turned = name == spec.head and base is not None and base.meta.turned
        if isinstance(change, Whole):
            matrix = turn(change.weight) if reads_turned else change.weight
            tensors += [ABSENT, ABSENT, ABSENT, pack_dense(matrix.to(kind).contiguous()).in_memory(), ABSENT]
            continue
        size, columns = _lengths(change)
        if base is not None and base.meta.kind == INT and change.magnitude is None and name != spec.embed:
            a = turn(change.a) if reads_turned else change.stored_a
            pairs[len(tensors)] = Pair(a, change.stored_b, change.scale, base.meta.group, base.perm, change.folded)
            beside[len(tensors)] = change, reads_turned
        else:
            low |= _floats(len(tensors), change, reads_turned)
        tensors += [ABSENT, ABSENT, size, ABSENT, columns]
    for place, packed in zip(pairs, pack_pairs(list(pairs.values())), strict=True):
        if packed is None:
            low |= _floats(place, *beside[place])
        else:
            tensors[place : place + 3] = packed
    for place, tensor in zip(low, _together(pack_alike(list(low.values()), kind)), strict=True):
        tensors[place] = tensor
    return PackedAdapter(np.array([program.sites[name] for name in changes], np.int32), tuple(tensors))


def _floats(place: int, change: LowRank, reads_turned: bool) -> dict[int, torch.Tensor]:
    """The two matrices in float32 by their places, from ``place`` on."""
    from toolkit.runners.native.packing.head import turn

    return {place: (turn(change.a) if reads_turned else change.a).T, place + 1: change.b}


def _lengths(change: LowRank) -> tuple[PackedTensor, PackedTensor]:
    """What the rows of DoRA's sums are to be long, and what their columns count, the rows being those before anything
    was folded into them."""
    if change.magnitude is None:
        return ABSENT, ABSENT
    own, size = change.folded, change.magnitude
    if own.divisors is not None:
        size = size / own.divisors.reshape(-1)
    return vector(size.numpy()), ABSENT if own.columns is None else vector((1 / own.columns).numpy())


def _warn_of_scaled_rows(changes: Mapping[str, Change], program: Program) -> None:
    """Of DoRA beside 4 bits, before which inputs, and rows with them, are often scaled."""
    from toolkit.artifacts.adapters.adapter import LowRank

    for name, change in changes.items():
        base = program.bases.get(name)
        four = base is not None and base.meta.kind == INT and base.meta.bits <= 4
        if four and isinstance(change, LowRank) and change.magnitude is not None:
            log.warning(
                "use_dora: an adapter's magnitudes are lengths of the float model's rows, which weights of 4 bits have "
                "not where inputs were scaled before rounding (AWQ), and these do not tell by how much: its answers "
                "may be nonsense; quantize the float model with tool lite, which keeps the scales, or merge the "
                "adapter into it first (tool lite merge)"
            )
            return


def _together(tensors: Sequence[PackedTensor]) -> list[PackedTensor]:
    """The same in one piece of memory."""
    places = side_by_side([t.data.nbytes for t in tensors])
    for tensor, place in zip(tensors, places, strict=True):
        place[:] = tensor.data
    return [replace(tensor, data=place) for tensor, place in zip(tensors, places, strict=True)]


class Shelf:
    """The adapters of a model by their numbers, of which as many are in memory as ``limit`` bytes hold (0 = any): those
    used last. ``read``: packs one. ``put``, ``drop``: into and out of the library, between steps.

    An adapter that a step needs is read where it is not there, and what was used longest ago makes room for it; those
    of the step itself stay, whatever the limit. One that a step will need is read by a thread of its own (``ready``),
    while steps of others run.
    """

    AHEAD = 4  # read for steps that have not come: more are read once more

    def __init__(
        self,
        read: Callable[[int], PackedAdapter],
        put: Callable[[int, PackedAdapter], None],
        drop: Callable[[int], None],
        limit: int = 0,
    ) -> None:
        self._read, self._put, self._drop, self._limit = read, put, drop, limit
        self._held: OrderedDict[int, PackedAdapter] = OrderedDict()  # used last comes last
        self._coming: dict[int, Future[PackedAdapter]] = {}
        self._reader: ThreadPoolExecutor | None = None
        self.reads = 0

    @property
    def nbytes(self) -> int:
        """What those in memory take."""
        return sum(adapter.nbytes for adapter in self._held.values())

    @property
    def held(self) -> list[int]:
        """Numbers of those in memory, used longest ago first."""
        return list(self._held)

    def ready(self, number: int, seconds: float = 0.0) -> bool:
        """Whether a step that needs it has not to wait for a file, perhaps within this time."""
        if number in self._held:
            return True
        if number not in self._coming:
            done = [n for n, read in self._coming.items() if read.done()]
            for other in done[: max(0, len(self._coming) + 1 - self.AHEAD)]:
                del self._coming[other]
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, "adapters")
            self._coming[number] = self._reader.submit(self._read, number)
        wait([self._coming[number]], seconds)
        return self._coming[number].done()

    def need(self, numbers: Sequence[int]) -> None:
        """Have these in memory. ToolkitError passes through where one cannot be read."""
        wanted = set(numbers)
        for number in sorted(wanted):
            if number not in self._held:
                coming = self._coming.pop(number, None)
                adapter = self._read(number) if coming is None else coming.result()
                self._make_room(adapter.nbytes, wanted)
                self._put(number, adapter)
                self._held[number] = adapter
                self.reads += 1
            self._held.move_to_end(number)

    def forget(self, number: int) -> None:
        """Give back what it takes."""
        self._coming.pop(number, None)
        if number in self._held:
            self._drop(number)  # before its memory goes: a step may be reading it until then
            del self._held[number]

    def empty(self) -> None:
        """Give back what all take."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        self._reader = None
        for number in [*self._coming, *self._held]:
            self.forget(number)

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
