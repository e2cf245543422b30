"""How much processor time following a grammar may take, token by token.

Most grammars are followed in microseconds. A few (``(a*)*b``, say) can read the same text in so many ways that each
token takes longer than the one before, without end.
"""

from __future__ import annotations

import time

AT_ONCE = 0.2  # seconds that one request may take ahead of its tokens
EACH = 0.004  # seconds that each token adds, up to AT_ONCE
STEP = 0.032  # seconds that the grammars of one step add together: where they are many, each has less of both


class Pace:
    """Measures calls in the calling thread: ``with pace: …``; ``lost`` once they took too long.

    ``among``: grammars that this step follows; ``left``: seconds that the request may take at once.
    """

    def __init__(self) -> None:
        self.among = 1
        self.left = AT_ONCE
        self._started = 0.0

    @property
    def lost(self) -> bool:
        return self.left < 0

    def next_token(self) -> None:
        """Another token's time is there."""
        each = min(EACH, STEP / self.among)
        self.left = min(self.left + each, AT_ONCE * each / EACH)

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *exc: object) -> None:
        self.left -= time.thread_time() - self._started
