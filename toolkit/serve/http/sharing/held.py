"""What answers hold until they are sent whole: counted while it grows, as bodies are while they arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from toolkit.configs.option import spelled
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits

# Measured with tracemalloc up to the last byte of a chat's JSON, which takes most: some bytes too many for other APIs.
TOKEN_BYTES = 64  # of text and token ids
NUMBER_BYTES = 24  # of a vector, or of an expert that a token went to: as it comes, as an object, in JSON
ENTRY_BYTES = 600  # of a log-probability, of which a token has its own and those of alternatives


def entries_bytes(entries: int) -> int:
    """What the log-probabilities of a token take, its own among ``entries``, which is told once more."""
    return ENTRY_BYTES * (entries + 1)


class Held:
    """What all answers hold. Beyond ``max_held_bytes`` the largest one is ended of the user whose answers hold most."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._answers: set[Account] = set()
        self._total = 0

    @contextmanager
    def answer(self) -> Iterator[None]:
        """The account of a request, which this task and those that it starts find in ``account``."""
        own = Account(self, self._limits)
        self._answers.add(own)
        tokens = account.set(own), stays.set(own)
        try:
            yield
        finally:
            account.reset(tokens[0])
            stays.reset(tokens[1])
            self._answers.discard(own)
            self._total -= own.bytes

    def grow(self, size: int) -> None:
        self._total += size
        if self._total > self._limits.max_held_bytes:
            of_users: Counter[str] = Counter()
            for answer in self._answers:
                of_users[answer.user] += answer.bytes
            max(self._answers, key=lambda answer: (of_users[answer.user], answer.bytes)).over = True


class Account:
    """``bytes``: what one answer holds, to ``user``; ``over``: it has to end."""

    def __init__(self, held: Held, limits: Limits) -> None:
        self.bytes = 0
        self.user = ""
        self.over = False
        self._held = held
        self._limits = limits

    def expect(self, size: int) -> None:
        """Raise ApiError 400 for an answer that will hold too much."""
        if size > self._limits.max_held_bytes:
            raise self._limits.refusal("max_held_bytes", None, size, f"bytes of one answer ({_FEWER})")

    def add(self, size: int, user: str = "") -> None:
        """Count ``size`` more of ``user``'s. Raises ApiError: 400 for an answer that is too much alone, 429 for the
        largest of the user who has most, where all are too much together."""
        self.bytes += size
        self.user = user
        self._held.grow(size)
        self.expect(self.bytes)
        if self.over:
            full = spelled("max_held_bytes")
            text = f"the answers under way fill the server's {full}, and this one is the largest of who has most"
            raise ApiError(
                429, f"{text} ({self.bytes:,} bytes): {_FEWER}, or try again later", code="too_many_requests"
            )


_FEWER = "answers x max_tokens x logprobs: ask for fewer, or for a stream"
account: ContextVar[Account | None] = ContextVar("toolkit_held", default=None)  # None: it is sent as it comes
stays: ContextVar[Account | None] = ContextVar("toolkit_stays", default=None)  # what is held though it is a stream
