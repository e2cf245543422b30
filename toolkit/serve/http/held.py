"""What answers hold until they are sent whole: counted while it grows, as bodies are while they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from toolkit.configs.option import spelled
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits

# Measured with tracemalloc up to the last byte of a chat's JSON, which takes most: some bytes too many for other APIs.
TOKEN_BYTES = 64  # of text and token ids
ENTRY_BYTES = 600  # of a log-probability, of which a token has its own and those of alternatives


def entries_bytes(entries: int) -> int:
    """What the log-probabilities of a token take, its own among ``entries``, which is told once more."""
    return ENTRY_BYTES * (entries + 1)


class Held:
    """What all answers hold. Beyond ``max_held_bytes`` the one that holds most is ended."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._answers: set[Account] = set()
        self._total = 0

    @contextmanager
    def answer(self) -> Iterator[None]:
        """The account of a request, which this task and those that it starts find in ``account``."""
        own = Account(self, self._limits)
        self._answers.add(own)
        token = account.set(own)
        try:
            yield
        finally:
            account.reset(token)
            self._answers.discard(own)
            self._total -= own.bytes

    def grow(self, size: int) -> None:
        self._total += size
        if self._total > self._limits.max_held_bytes:
            max(self._answers, key=lambda answer: answer.bytes).over = True


class Account:
    """``bytes``: what one answer holds; ``over``: it has to end."""

    def __init__(self, held: Held, limits: Limits) -> None:
        self.bytes = 0
        self.over = False
        self._held = held
        self._limits = limits

    def expect(self, size: int) -> None:
        """Raise ApiError 400 for an answer that will hold too much."""
        if size > self._limits.max_held_bytes:
            raise self._limits.refusal("max_held_bytes", None, size, f"bytes of one answer ({_FEWER})")

    def add(self, size: int) -> None:
        """Count ``size`` more. Raises ApiError: 400 for an answer that is too much alone, 429 for one that holds most
        of all where they are too much together."""
        self.bytes += size
        self._held.grow(size)
        self.expect(self.bytes)
        if self.over:
            text = f"the answers under way fill the server's {spelled('max_held_bytes')}, and this one holds most"
            raise ApiError(
                429, f"{text} ({self.bytes:,} bytes): {_FEWER}, or try again later", code="too_many_requests"
            )


_FEWER = "answers x max_tokens x logprobs: ask for fewer, or for a stream"
account: ContextVar[Account | None] = ContextVar("toolkit_held", default=None)  # None: it is sent as it comes
