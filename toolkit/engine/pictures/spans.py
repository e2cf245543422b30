"""Where the pictures of a request stand among its tokens, and what positions its tokens have for that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.models.eyes.pictures import Picture
from toolkit.models.eyes.vision import VisionSpec

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class Span:
    """A picture and the places in the prompt that its rows take, rising."""

    picture: Picture
    places: NDArray[np.int64]


def find_spans(token_ids: Sequence[int], pictures: Sequence[Picture], image_token: int) -> list[Span]:
    """Raises UsageError where the prompt has more or fewer places than the pictures take."""
    places = np.flatnonzero(np.asarray(token_ids) == image_token)
    if len(places) != (needed := sum(picture.tokens for picture in pictures)):
        raise UsageError(
            f"prompt: expected {needed} image tokens (id {image_token}) for {len(pictures)} pictures, found "
            f"{len(places)}; write no image tokens of the model's own, and as many {'<IMAGE_TOKEN>'} as pictures"
        )
    ends = np.cumsum([picture.tokens for picture in pictures])
    return [Span(p, places[end - p.tokens : end]) for p, end in zip(pictures, ends.tolist(), strict=True)]


def runs_of(spans: Sequence[Span]) -> NDArray[np.int64]:
    """(first, stop) of the places of each picture that stand side by side, [runs, 2]."""
    parts = [part for span in spans for part in np.split(span.places, np.flatnonzero(np.diff(span.places) > 1) + 1)]
    return np.array([(part[0], part[-1] + 1) for part in parts], np.int64)


def looks_of(spans: Sequence[Span], start: int, stop: int) -> list[tuple[int, int, list[Picture]]]:
    """(first, stop, pictures) of the places from ``start`` to ``stop`` that look at pictures: each at those of the last
    run of marks before it, as far as it has come."""
    marks = [int(span.places[0]) for span in spans]
    found, run = [], 0
    for i, (mark, end) in enumerate(zip(marks, [*marks[1:], stop], strict=False)):
        run = run if i and marks[i - 1] == mark - 1 else i
        if (first := max(mark, start)) < min(end, stop):
            found.append((first, min(end, stop), [span.picture for span in spans[run : i + 1]]))
    return found


def positions_of(vision: VisionSpec | None, length: int, spans: Sequence[Span]) -> tuple[I32 | None, int]:
    """Positions of a prompt's ``length`` tokens, int32 [1 or 3, length], None where they are their places, and by how
    much those of later tokens differ from theirs."""
    if vision is None or not (vision.axes or vision.shared):
        return None, 0
    return axes_of(length, spans) if vision.axes else shared_of(length, spans)


def shared_of(length: int, spans: Sequence[Span]) -> tuple[I32, int]:
    """One position for all tokens of a picture between its first and its last, int32 [1, length]. Source: the code of
    CogVLM's authors, arXiv 2311.03079."""
    steps = np.ones(length, np.int32)
    for span in spans:
        steps[span.places[2:-1]] = 0
    found = np.cumsum(steps, dtype=np.int32) - 1
    return found[None], int(found[-1]) + 1 - length


def axes_of(length: int, spans: Sequence[Span]) -> tuple[I32, int]:
    """Positions in time, rows and columns of a prompt's ``length`` tokens, int32 [3, length], and by how much those
    of later tokens differ from their places.

    Text has three equal positions, one after another. A picture's tokens have one time, their rows and their columns;
    those of a video's later pictures begin where its first does, but for the time. What follows goes on behind the
    longest of the three. Source: arXiv 2409.12191, section 2.1.
    """
    found = np.empty((3, length), np.int32)
    at, place, begin = 0, 0, 0
    for span in spans:
        first, frame = int(span.places[0]), span.picture.frame
        found[:, place:first] = np.arange(at, at + first - place)
        at += first - place
        time = (frame.time if frame is not None else None) or 0
        begin = begin if frame is not None and frame.follows and frame.time is not None else at
        rows, columns = span.picture.grid
        found[0, first : first + rows * columns] = begin + time
        found[1, first : first + rows * columns] = begin + np.repeat(np.arange(rows), columns)
        found[2, first : first + rows * columns] = begin + np.tile(np.arange(columns), rows)
        at, place = max(at, begin + max(time + 1, rows, columns)), first + rows * columns
    found[:, place:] = np.arange(at, at + length - place)
    return found, at - place
