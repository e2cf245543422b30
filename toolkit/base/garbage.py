"""How often Python looks for objects that hold each other and nobody else holds, and what errors hold."""

from __future__ import annotations

import gc

# Objects that may be new before it looks. At Python's 700 a start, which makes hundreds of thousands that all stay, is
# longer by a tenth; and an engine looks in every step of many requests, and after a thousand such steps among all that
# was loaded: 0.15 s without a token.
YOUNG = 10_000


def look_seldom() -> None:
    """Have this process look once in ``YOUNG`` new objects. For processes that are ours alone, not a user's program."""
    gc.set_threshold(YOUNG)


def let_go(error: BaseException | None) -> None:
    """Of an error that has been told keep where it came from, not what was held there, such as tensors, or a cache in
    whose place there may soon have to be room for another."""
    import traceback  # not by every command's start

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
