"""Rows of pictures for the steps that need them. What was encoded is kept: a second question about a picture encodes
nothing, nor does a prompt that is computed again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.engine.step_builder import Step

if TYPE_CHECKING:
    from toolkit.models.vision import Picture
    from toolkit.runners.base import Runner

Rows = NDArray[np.float32]
KEPT_BYTES = 256 << 20


class Sight:
    """``together``: pictures that are encoded at once, at most. ``encoded``: how many were, since the start."""

    def __init__(self, runner: Runner, together: int = 1, kept_bytes: int = KEPT_BYTES) -> None:
        self._runner, self._together, self._most = runner, together, kept_bytes
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()  # by the picture's digest, the least used first
        self._bytes = 0
        self.encoded = 0

    def show(self, step: Step) -> None:
        """Give the step's batch the rows that stand in its chunks of prompts."""
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

    def forget(self) -> None:
        """Give the memory back."""
        self._kept.clear()
        self._bytes = 0

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
