"""From what a user names to frames of a video, and from those to the pictures that stand for it.

Files are decoded by PyAV in a process of their own, which an evil one may only crash.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.base import extras
from toolkit.base.lazy_dataclass import dataclass
from toolkit.box.box import Box, Limits, Ticket
from toolkit.errors import UsageError
from toolkit.models.eyes.pictures import Picture, Recipe
from toolkit.models.eyes.videos import FEWEST, TAKEN, Frame, Video
from toolkit.vision.clip import Clip
from toolkit.vision.decoding import decoding
from toolkit.vision.images import Rules, Sampling, data_url, is_url, open_image, read_bytes
from toolkit.vision.pixels import resized
from toolkit.vision.recipes import area_grid, as_picture, check_shape, normed, prepare
from toolkit.vision.room import Room
from toolkit.vision.spelling import spelled
from toolkit.vision.video_job import FORMATS, sniff

if TYPE_CHECKING:
    from PIL.Image import Image

FRAMES_BYTES = 1 << 29  # of one video at most
SHORTEST = 0.1  # seconds of processor time that a video has in any case once it was let in
LIMITS = Limits(memory=4 << 30, cpu_seconds=60.0, seconds=90.0, reply=FRAMES_BYTES + (1 << 20))


@dataclass
class Reader:
    """Reads videos. ``room``: bytes that they hold while they are decoded. It starts its process with the first one."""

    room: Room | None = None
    _box: Box = field(default_factory=lambda: Box("toolkit.vision.video_job:start", LIMITS, size=2, mapped=True))

    def open(
        self,
        source: Any,
        rules: Rules,
        sampling: Sampling,
        video: Video,
        seconds: float = LIMITS.cpu_seconds,
        shown: str = "video",
        holding: ExitStack | None = None,
        ticket: Ticket | None = None,
    ) -> Clip:
        """The frames of a video that a model is to see. ``source``: URL, data URL, path, bytes, which messages call
        ``shown``, Clip, or a list of pictures, which are all taken. Raises UsageError, one line, for one that may not
        be read, is broken, too large or takes more than ``seconds`` of processor time; BusyError where others left it
        no time or no room. ``holding``: where it keeps its place in the room until the frames are done with.
        ``ticket``: by which it may be called off."""
        if isinstance(source, Clip):
            _check_frames(source.frames)
            if len(source.seconds) != len(source) or not source.rate > 0:
                found = f"{len(source.seconds)} for {len(source)} frames, {source.rate} a second"
                raise UsageError(f"video: expected a second for each frame and a rate above 0, found {found}")
            return source
        if isinstance(source, list | tuple | np.ndarray):
            return of_frames(source, rules, sampling.fps or video.fps)
        asked = _asked(rules, sampling, video)
        if isinstance(source, str | Path):
            data, shown = read_bytes(str(source), rules, rules.max_video_bytes, "video")
        elif isinstance(source, bytes):
            data = source
        else:
            raise UsageError(f"video: expected a URL, a path, bytes or frames, found {type(source).__name__}")
        if len(data) > rules.max_video_bytes:
            raise UsageError(f"{shown}: expected at most {rules.max_video_bytes:,} bytes, found {len(data):,}")
        if (kind := sniff(data)) is None:
            raise UsageError(f"{shown}: expected a video ({FORMATS}), found {len(data):,} bytes that are none")
        if seconds <= 0:
            raise UsageError(f"{shown}: there is no time left to decode it; send fewer or shorter videos")
        try:
            with decoding(shown):
                about, frames = self._run({"format": kind, **asked}, data, seconds, shown, holding, ticket)
        except ValueError as e:
            raise UsageError(f"{shown}: {e}") from e
        shape = (-1, *about["shape"])
        return Clip(np.frombuffer(frames, np.uint8).reshape(shape), tuple(about["seconds"]), about["rate"])

    def _run(
        self,
        value: dict[str, Any],
        data: bytes,
        seconds: float,
        shown: str,
        holding: ExitStack | None,
        ticket: Ticket | None,
    ) -> tuple[Any, Any]:
        """What the job makes of it. With a room it is measured first, and decoded once there is as much."""
        extras.require("av", "messages: videos")
        until = time.monotonic() + seconds
        if self.room is not None and holding is not None:
            about, _ = self._box.run({**value, "measure": True}, data, ticket, cpu_seconds=seconds)
            size = len(data) + about["bytes"]
            holding.enter_context(self.room.of(size, max(until - time.monotonic(), 0.0), shown))
        return self._box.run(value, data, ticket, cpu_seconds=max(until - time.monotonic(), SHORTEST))


def _asked(rules: Rules, sampling: Sampling, video: Video) -> dict[str, Any]:
    """What the process that decodes is told."""
    count, by_second = sampling.num_frames, sampling.fps
    if count is not None and not 1 <= count <= rules.max_video_frames:
        raise UsageError(f"num_frames: expected 1 to {rules.max_video_frames}, found {count}")
    most = count or (rules.max_video_frames if by_second is not None else min(TAKEN, rules.max_video_frames))
    return {
        "num_frames": most,
        "fps": by_second or (video.fps if count is None else None),
        "fewest": 1 if by_second is not None else FEWEST,
        "middle": video.middle,
        "max_seconds": rules.max_video_seconds,
        "max_pixels": rules.max_pixels,
        "max_bytes": FRAMES_BYTES,
    }


def video_url(source: str) -> str:
    """A URL as it is; of a file a data URL that holds it. Raises UsageError, one line, for what is no video."""
    if is_url(source) or source[:5].lower() == "data:":
        return source
    rules = Rules()
    data, shown = read_bytes(source, rules, rules.max_video_bytes, "video")
    if sniff(data) is None:
        raise UsageError(f"{shown}: expected a video ({FORMATS}), found {len(data):,} bytes that are none")
    return data_url(source, data, "video/mp4")


def of_frames(frames: Sequence[Any] | np.ndarray, rules: Rules, rate: float) -> Clip:
    """Those that a user has cut, ``rate`` of them a second: an array as in ``Clip``, or pictures of one size."""
    if isinstance(frames, np.ndarray):
        _check_frames(frames)
        return Clip(frames, tuple(i / rate for i in range(len(frames))), rate)
    if not 1 <= len(frames) <= rules.max_video_frames:
        raise UsageError(f"video: expected 1 to {rules.max_video_frames} frames, found {len(frames)}")
    arrays = [np.asarray(open_image(frame, rules)) for frame in frames]
    if len(shapes := {array.shape for array in arrays}) > 1:
        raise UsageError(f"video: expected frames of one size, found {len(shapes)} sizes")
    return of_frames(np.stack(arrays), rules, rate)


def _check_frames(frames: np.ndarray) -> None:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise UsageError(f"video: expected uint8 [frames, height, width, 3], found {frames.dtype} {list(frames.shape)}")


def watch(recipe: Recipe, video: Video, clip: Clip) -> Iterator[Picture]:
    """The pictures that stand for a video, in their order, each made when it is asked for."""
    from PIL import Image as pillow

    recipe = replace(recipe, **video.changes)
    images = (pillow.fromarray(frame) for frame in clip.frames)  # one after the other: all would be as large again
    check_shape(pillow.fromarray(clip.frames[0]))
    count = -(-len(clip) // video.together)
    if recipe.kind == "area":
        made = _together(recipe, video, images, clip)
    elif video.pooled:
        made = _pooled(recipe, images, len(clip))
    else:
        made = (prepare(recipe, image) for image in images)
    return (_framed(recipe, video, clip, i, count, picture) for i, picture in enumerate(made))


def _together(recipe: Recipe, video: Video, images: Iterator[Image], clip: Clip) -> Iterator[Picture]:
    """Some frames a picture, all of one grid."""
    count, size = video.together, clip.frames.shape[1:3]
    frames = max(len(clip), count) if video.whole else 1
    most = min(video.most, recipe.most * frames)  # what the tower has memory for
    ruled = replace(recipe, least=min(video.least, most), most=most)
    if video.whole:
        grid = area_grid(replace(ruled, short=recipe.unit), size, frames, max(round(len(clip) / count), 1) * count)
    else:
        grid = area_grid(ruled, size)
    wanted = (grid[0] * recipe.unit, grid[1] * recipe.unit)
    while some := [
        normed(resized(image, wanted, recipe.resample), recipe.mean, recipe.std) for image in islice(images, count)
    ]:
        some += [some[-1]] * (count - len(some))
        yield as_picture(recipe, [np.stack(some, 1).reshape(1, -1, *wanted)], grid, size, grid[0] * grid[1])


def _pooled(recipe: Recipe, images: Iterator[Image], count: int) -> Iterator[Picture]:
    side = -(-round(recipe.per_tile**0.5) // 2)
    for i, image in enumerate(images):
        ends = i + 1 == count
        yield replace(prepare(recipe, image), tokens=side * side + ends, frame=Frame(pooled=(side, side)))


def _framed(recipe: Recipe, video: Video, clip: Clip, i: int, count: int, picture: Picture) -> Picture:
    """``picture`` as the ``i``-th of ``count`` that stand for ``clip``."""
    first = clip.seconds[i * video.together]
    last = clip.seconds[min((i + 1) * video.together, len(clip)) - 1]
    time = None
    if video.ticks is not None:
        step = np.float32(video.ticks * video.together / clip.rate) if video.ticks else np.float32(1)
        time = int(np.float32(i) * step)
    said = video.said.format(
        picture=spelled(recipe, picture, i) if "{picture}" in video.said else "",
        tokens=recipe.token * picture.tokens,
        number=i + 1,
        first=int(first),
        clock=f"{int(first) // 60:02d}:{int(first) % 60:02d}",
        seconds=(first + last) / 2,
    )
    pooled = None if picture.frame is None else picture.frame.pooled
    frame = Frame(i > 0, time, pooled, said + (video.between if i + 1 < count else ""))
    told = repr((picture.digest, frame.follows, time, pooled, picture.tokens))
    return replace(picture, frame=frame, digest=blake2b(told.encode(), digest_size=32).digest())
