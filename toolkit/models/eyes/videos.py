"""How a family's models are shown videos: as frames, each a picture or two of them one, in the place of one picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from toolkit.base.lazy_dataclass import dataclass

TAKEN = 32  # frames of a video at most, where nothing is said
FEWEST = 4  # frames that are taken at least where they are counted by the second


@dataclass(frozen=True)
class Video:
    """``fps``: frames taken a second. ``middle``: they are the middles of equal parts, not the first, the last and
    those between. ``together``: frames that one picture holds, of which the last is repeated where one lacks.

    ``least``, ``most``: pixels of a frame, where pictures are of kind "area"; ``whole``: of all frames. ``changes``:
    fields of the recipe by which frames are prepared. ``pooled``: each two by two of a frame's rows become one, and a
    newline ends the video. ``ticks``: what positions in time go on by in a second, 0: one a picture; None: each picture
    stands by itself.

    ``said``: what is written for a picture of it: {picture} as any is spelled, {tokens}, {number} from 1 on, {first}
    whole seconds of its first frame, {clock} those as minutes and seconds, {seconds} mean of its first and last.
    ``between``: behind all but the last. ``around``: what stands before and behind all of them, instead of what stands
    around a picture.
    """

    fps: float = 2.0
    middle: bool = False
    together: int = 1
    least: int = 0
    most: int = 0
    whole: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    pooled: bool = False
    ticks: float | None = None
    said: str = "{picture}"
    between: str = ""
    around: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Frame:
    """What a picture has that is a part of a video. ``follows``: another of the same is right before it. ``time``:
    positions in time since the first of them, None: it has its own. ``pooled``: rows and columns that its tokens
    become. ``said``: how it is spelled, None once it has been."""

    follows: bool = False
    time: int | None = None
    pooled: tuple[int, int] | None = None
    said: str | None = None
