"""How a long text is cut for scoring, so that each token is scored once with as much before it as fits."""

from __future__ import annotations

from collections.abc import Iterator


def scoring_windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first scored) of every window over ``tokens`` tokens.

    Windows start ``stride`` apart and hold at most ``window`` tokens; each scores the tokens that no earlier one did.
    The first token of the text has nothing before it and is never scored; with ``stride == window`` neither is
    the first of any window.
    """
    assert 1 <= stride <= window
    scored = 1
    for start in range(0, tokens, stride):
        stop = min(start + window, tokens)
        first = max(scored, start + 1)
        if first < stop:
            yield start, stop, first
        scored = stop
        if stop == tokens:
            return
