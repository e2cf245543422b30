"""Frames of a video file: the job of a confined process (``toolkit.box``), as files come from anyone.

Only the reader of the format that the first bytes tell is used: others of FFmpeg's would open what a file names.
"""

from __future__ import annotations

import bisect
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from toolkit.box.box import STAND_BACK

FORMATS = "MP4, MOV, WebM, MKV, AVI, GIF"
SEEKING = ("mov", "matroska")  # formats that lead to a frame by its time; AVI knows the order of decoding alone


def sniff(data: bytes) -> str | None:
    """FFmpeg's name of the format, of those that are read."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return "gif" if data[:6] in (b"GIF87a", b"GIF89a") else None


def start(setup: Any, data: bytes) -> Callable[[Any, bytes], tuple[Any, Any]]:
    """``run(value, data)``: ``value`` has ``format``, ``num_frames``, ``fps``, ``fewest``, ``middle`` (see ``choose``),
    and the limits ``max_seconds``, ``max_pixels``, ``max_bytes`` (of all frames); ``data`` is the file. Gives ``shape``
    of a frame, ``seconds`` and ``rate`` as in ``Clip``, and each frame's bytes; with ``measure`` instead how many
    ``bytes`` they will be. Raises ValueError: what is wrong."""
    import av
    import numpy as np

    av.logging.set_level(None)
    os.nice(STAND_BACK)

    def run(value: dict[str, Any], data: bytes) -> tuple[Any, Any]:
        try:
            with closing(av.open(io.BytesIO(data), format=value["format"])) as container:
                return _read(container, value)
        except av.error.FFmpegError as e:
            raise ValueError(f"it is broken or cut off: {e.strerror}") from e

    def _read(container: Any, value: dict[str, Any]) -> tuple[Any, Any]:
        if not container.streams.video:
            raise ValueError("expected a video, found none in the file")
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        if not width * height:
            raise ValueError(f"expected a video, found {width} x {height} pixels")
        if width * height > value["max_pixels"]:
            found = f"{width} x {height} = {width * height:,}"
            raise ValueError(f"expected frames of at most {value['max_pixels']:,} pixels, found {found}")
        packets = [p for p in container.demux(stream) if p.pts is not None and p.size]
        keys = sorted(p.pts for p in packets if p.is_keyframe)
        times = sorted(p.pts for p in packets if not p.is_discard)  # others were cut away: they are decoded, not shown
        if not times:
            raise ValueError("expected a video, found no frame in it")
        tick = float(stream.time_base)
        mean = (times[-1] - times[0]) / max(len(times) - 1, 1) or 1 / (tick * float(stream.average_rate or 25))
        duration = (times[-1] - times[0] + mean) * tick
        if duration > value["max_seconds"]:
            raise ValueError(f"expected at most {value['max_seconds']:g} s, found {duration:.0f} s")
        indices = choose(len(times), duration, value["num_frames"], value["fps"], value["fewest"], value["middle"])
        if len(indices) * width * height * 3 > value["max_bytes"]:
            most = f"at most {value['max_bytes'] >> 20} MiB of frames"
            raise ValueError(f"expected {most}, found {len(indices)} of {width} x {height} pixels; lower num_frames")
        if value.get("measure"):
            return {"bytes": len(indices) * width * height * 3}, b""
        wanted = [times[i] for i in indices]
        seeks = container.format.name.partition(",")[0] in SEEKING
        shown = _frames(container, wanted, keys, seeks)
        shapes, frames = set(), []
        for frame in shown:
            pixels = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            shapes.add(pixels.shape)
            frames.append(pixels.tobytes())
            if len(shapes) > 1:
                raise ValueError("expected frames of one size, found several")
        seconds = [round((pts - times[0]) * tick, 6) for pts in wanted]
        about = {"shape": shapes.pop(), "seconds": seconds, "rate": len(indices) / duration}
        return about, frames

    return run


def choose(total: int, duration: float, num_frames: int, fps: float | None, fewest: int, middle: bool) -> list[int]:
    """Which of ``total`` frames: ``num_frames``; with ``fps`` so many a second, ``fewest`` to ``num_frames``. Evenly,
    from the first to the last or, ``middle``, those in the middle of equal parts."""
    count = num_frames if fps is None else min(max(int(duration * fps), fewest), num_frames)
    count = max(min(count, total), 1)
    if middle:
        return [int((i + 0.5) * total / count) for i in range(count)]
    return [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]


def _frames(container: Any, wanted: Sequence[int], keys: Sequence[int], seeks: bool) -> Iterator[Any]:
    """The frame shown at each of these times, rising. ``keys``: those of frames that need no other."""
    stream, at, frame = container.streams.video[0], None, None
    container.seek(0)
    decoded = container.decode(stream)
    for target in wanted:
        near = bisect.bisect_right(keys, target) - 1
        if seeks and at is not None and near >= 0 and keys[near] > at:
            container.seek(keys[near], stream=stream)
            decoded, at = container.decode(stream), keys[near] - 1
        while at is None or at < target:
            if (following := next(decoded, None)) is None:
                raise ValueError("it is cut off: frames are missing at its end")
            if following.pts is None:
                continue
            frame, at = following, following.pts
        yield frame
