"""A picture or video that a request asks about: what names it, and its file once that is fetched."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.vision.headers import BEGINNING, header
from toolkit.vision.images import Rules, read_bytes
from toolkit.vision.room import Room


@dataclass(frozen=True)
class Asked:
    """``where`` it stands in its request. ``source``: URL, data URL, path, bytes or what Python's callers have;
    ``shown``: what messages call its bytes. ``alone``: whether a model may cut it into tiles that does so only with a
    few pictures."""

    where: str
    source: Any = field(repr=False)
    options: Mapping[str, Any]
    video: bool
    alone: bool
    shown: str = ""

    @property
    def kind(self) -> str:
        return "video" if self.video else "image"

    @property
    def called(self) -> str:
        """What messages call it."""
        return self.shown or self.kind

    def most_bytes(self, rules: Rules) -> int:
        return rules.max_video_bytes if self.video else rules.max_bytes

    def read(self, rules: Rules) -> Asked:
        """With its bytes, where it names a file. Raises UsageError, one line."""
        data, shown = read_bytes(str(self.source), rules, self.most_bytes(rules), self.kind)
        return replace(self, source=data, shown=shown)

    def pixels(self, rules: Rules) -> int:
        """How many a picture has, by the beginning of its file; as many as may be where that does not tell."""
        found = header(self.beginning())
        return rules.max_pixels if found is None else found.pixels

    def beginning(self) -> bytes:
        """First bytes of its file, as far as they are at hand; none of a path."""
        if isinstance(self.source, bytes):
            return self.source[:BEGINNING]
        if not isinstance(self.source, str) or self.source[:5].lower() != "data:":
            return b""
        head, _, body = self.source[: BEGINNING * 4 // 3].partition(",")
        try:
            return base64.b64decode(body[: len(body) // 4 * 4]) if head.lower().endswith(";base64") else b""
        except binascii.Error:
            return b""

    @contextmanager
    def named(self) -> Iterator[None]:
        """What is raised inside says where it stands."""
        try:
            yield
        except UsageError as e:
            raise UsageError(f"{self.where}: {e}") from e


class Fetched:
    """One of another host with its file, whose bytes count in a room until it is closed, or nobody has it any more.
    ``seconds``: that it took."""

    def __init__(self, one: Asked, rules: Rules, room: Room) -> None:
        """Raises UsageError, one line, where it cannot be fetched, and BusyError where the room is full."""
        self._room, self._held = room, 0
        began = time.monotonic()

        def arrived(count: int) -> None:
            room.take(count, f"{one.where}: {one.kind}")
            self._held += count

        try:
            data, shown = read_bytes(str(one.source), rules, one.most_bytes(rules), one.kind, arrived)
            self.asked, self.seconds = replace(one, source=data, shown=shown), time.monotonic() - began
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        held, self._held = self._held, 0
        self._room.give(held)
