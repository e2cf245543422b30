"""Rows of pictures for the steps that need them. What was encoded is kept: a second question about a picture encodes
nothing, nor does a prompt that is computed again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.engine.pictures.spans import looks_of
from toolkit.engine.step import Step
from toolkit.runners.step import Views

if TYPE_CHECKING:
    from toolkit.models.eyes.pictures import Picture
    from toolkit.runners.base import Runner

Rows = NDArray[np.float32]
KEPT_BYTES = 256 << 20


class Sight:
    """``together``: pictures that are encoded at once, at most. ``numbers``: pictures that the runner keeps, at most,
    but for those of one step. ``encoded``: how many were, since the start."""

    def __init__(self, runner: Runner, together: int = 1, numbers: int = 1, kept_bytes: int = KEPT_BYTES) -> None:
        self._runner, self._together, self._most = runner, together, kept_bytes
        self._count = numbers
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # under which the runner has them, the least used first
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()  # by the picture's digest, the least used first
        self._bytes = 0
        self.encoded = 0

    def show(self, step: Step) -> None:
        """Give the step's batch the rows that stand in its chunks of prompts, or what its tokens look at."""
        vision = self._runner.spec.vision
        if vision is not None and vision.crossed:
            step.batch.views = self._views(step)
            return
        wanted: list[tuple[NDArray[np.int64], Picture, slice]] = []  # flat tokens, and which of the picture's rows
        cu, decodes = step.batch.cu_seqlens, len(step.plan.decodes)
        for i, (seq, start, count) in enumerate(step.plan.chunks, start=decodes):
            for span in seq.spans:
                inside = slice(*np.searchsorted(span.places, (start, start + count)))
                if inside.start < inside.stop:
                    wanted.append((span.places[inside] - start + cu[i], span.picture, inside))
        if not wanted:
            return
        rows = self._rows({picture.digest: picture for _, picture, _ in wanted})
        step.batch.embeds = np.concatenate([rows[picture.digest][inside] for _, picture, inside in wanted])
        step.batch.embed_index = np.concatenate([index for index, _, _ in wanted]).astype(np.int32)
        if vision is not None and vision.routed:
            cut = (index[: len(index) - (at.stop == p.tokens and not vision.routed_last)] for index, p, at in wanted)
            step.batch.routed = np.concatenate(list(cut)).astype(np.int32)

    def forget(self) -> None:
        """Give the memory back."""
        self._kept.clear()
        self._numbers.clear()
        self._bytes = 0

    def lost(self) -> None:
        """A step failed: what the runner has of pictures is not known."""
        self._numbers.clear()

    def _views(self, step: Step) -> Views | None:
        found: list[tuple[int, int, list[Picture]]] = []
        cu, lengths = step.batch.cu_seqlens.tolist(), step.batch.seq_lens.tolist()
        for i, seq in enumerate(step.plan.sequences()):
            start = lengths[i] - (cu[i + 1] - cu[i])
            found += [(a - start + cu[i], b - start + cu[i], p) for a, b, p in looks_of(seq.spans, start, lengths[i])]
        wanted = {picture.digest: picture for _, _, pictures in found for picture in pictures}
        spare = [d for d, number in self._numbers.items() if number >= self._count and d not in wanted]
        gone = [self._numbers.pop(digest) for digest in spare]
        if not found and not gone:
            return None
        missing = {digest: picture for digest, picture in wanted.items() if digest not in self._numbers}
        rows = self._rows(missing) if missing else {}
        for digest in wanted:
            self._numbers[digest] = self._number(digest, wanted)
            self._numbers.move_to_end(digest)
        seen = [[self._numbers[picture.digest] for picture in pictures] for _, _, pictures in found]
        return Views(
            rows=np.concatenate([np.zeros((0, self._runner.spec.hidden_size), np.float32), *rows.values()]),
            new=np.array([(self._numbers[d], len(r)) for d, r in rows.items()], np.int32).reshape(-1, 2),
            gone=np.array(gone, np.int32),
            tokens=np.array([(a, b) for a, b, _ in found], np.int32).reshape(-1, 2),
            ptr=np.cumsum([0, *map(len, seen)], dtype=np.int32),
            seen=np.array([number for numbers in seen for number in numbers], np.int32),
        )

    def _number(self, digest: bytes, wanted: dict[bytes, Picture]) -> int:
        """That under which the runner has the picture or shall have it: a new one, or where there are enough that of
        the one that has not been looked at for longest."""
        if digest in self._numbers:
            return self._numbers[digest]
        idle = next((d for d in self._numbers if d not in wanted), None)
        if idle is None or len(self._numbers) < self._count:
            used = set(self._numbers.values())
            return next(number for number in range(len(used) + 1) if number not in used)
        return self._numbers.pop(idle)

    def _rows(self, pictures: dict[bytes, Picture]) -> dict[bytes, Rows]:
        found = {}
        for digest in pictures:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                found[digest] = self._kept[digest]
        missing = [digest for digest in pictures if digest not in found]
        for first in range(0, len(missing), self._together):
            some = missing[first : first + self._together]
            for digest, rows in zip(some, self._runner.encode([pictures[d] for d in some]), strict=True):
                found[digest] = rows
                self._keep(digest, rows)
            self.encoded += len(some)
        return found

    def _keep(self, digest: bytes, rows: Rows) -> None:
        self._kept[digest] = rows
        self._bytes += rows.nbytes
        while self._bytes > self._most:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
