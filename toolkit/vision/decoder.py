"""Pictures' files decoded and cut in processes of their own, which an evil one may only crash."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import field, replace

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import plain
from toolkit.box.box import Box, Limits
from toolkit.box.box import Ticket as Ticket  # for those who call it off
from toolkit.configs.option import spelled
from toolkit.errors import UsageError
from toolkit.models.eyes.pictures import Picture, Recipe
from toolkit.vision.decoding import decoding
from toolkit.vision.headers import COSTS, header
from toolkit.vision.images import Rules, check_size
from toolkit.vision.recipes import made_of
from toolkit.vision.room import Room
from toolkit.vision.squares import SQUARE
from toolkit.vision.videos import Reader

LIMITS = Limits(memory=3 << 29, cpu_seconds=30.0, seconds=60.0)
AT_ONCE = 3  # processes
PIXEL = 4  # bytes that Pillow has for one in RGB


@dataclass
class Decoder:
    """``room``: bytes that pictures and videos hold while they are decoded; ``fetched``: of files that wait for it;
    ``prepared``: of the numbers that are made, None: any; ``videos``: their reader. It starts a process with the first
    picture."""

    room: Room
    fetched: Room
    prepared: Room | None
    videos: Reader
    _box: Box = field(default_factory=lambda: Box("toolkit.vision.image_job:start", LIMITS, size=AT_ONCE, mapped=True))

    @classmethod
    def of(cls, rules: Rules = Rules()) -> Decoder:
        """With as much room as the rules say."""
        room = Room(rules.max_decoding_bytes, spelled("max_decoding_bytes"))
        fetched = Room(rules.max_fetched_bytes, spelled("max_fetched_bytes"))
        most = rules.max_prepared_bytes
        prepared = None if most is None else Room(most, spelled("max_prepared_bytes"))
        return cls(room, fetched, prepared, Reader(room))

    def counted(self, pictures: Iterator[Picture], where: str) -> Iterator[Picture]:
        """These, whose numbers hold room until nobody has them any more. Raises BusyError, which says ``where``, when
        there is none left."""
        room = self.prepared
        for picture in pictures:
            if room is None:
                yield picture
                continue
            for part in picture.parts:
                room.take(part.nbytes, where)
                weakref.finalize(part if part.base is None else part.base, room.give, part.nbytes)
            yield picture

    def picture(
        self, data: bytes, recipe: Recipe, rules: Rules, alone: bool, shown: str, ticket: Ticket | None = None
    ) -> Picture:
        """A file's picture as ``prepare`` makes it; ``shown``: what messages call it. Raises UsageError, one line, for
        one that is broken, too large or takes too long; BusyError where others leave it no room, or ``ticket`` calls it
        off."""
        if len(data) > rules.max_bytes:
            raise UsageError(f"{shown}: expected at most {rules.max_bytes:,} bytes, found {len(data):,}")
        pixels, cost = rules.max_pixels, min(rules.max_pixels * max(COSTS.values()), self.room.most)
        if (found := header(data)) is not None:
            check_size(*found.size, rules, shown)
            pixels, cost = found.pixels, found.cost
            if cost > self.room.most:
                size = (
                    f"{found.format} of {found.size[0]} x {found.size[1]} pixels, for which {cost >> 20} MiB are needed"
                )
                raise UsageError(f"{shown}: found {size}, expected at most {self.room.most >> 20} ({self.room.name})")
            if recipe.pad or recipe.kind == "boxed":
                cost += PIXEL * min(max(found.size), SQUARE) ** 2
        recipe = replace(recipe, video=None)
        value = {"recipe": plain(recipe), "alone": alone, "max_pixels": pixels, "shown": shown}
        try:
            with decoding(shown), self.room.of(len(data) + cost, LIMITS.seconds, shown):
                about, numbers = self._box.run(value, data, ticket)
        except ValueError as e:
            raise UsageError(str(e)) from e
        tiles, at = [], 0
        for shape, kind in about["tiles"]:
            tiles.append(np.frombuffer(numbers, kind, count := int(np.prod(shape)), at).reshape(shape))
            at += count * np.dtype(kind).itemsize
        return made_of(recipe, tiles, tuple(about["grid"]), tuple(about["size"]))
