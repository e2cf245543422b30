"""Requests that were running when the engine died, known by what they ask for: none of them kills it a third time."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from toolkit.engine.process.outage import RESTART_WINDOW
from toolkit.engine.process.records import pack_add
from toolkit.engine.request import EngineRequest, Whose
from toolkit.errors import UsageError

MOST = 4096  # contents that are remembered


class Suspects:
    """Whom to blame for a crash, narrowed down by a second one.

    After a crash, all that ran are suspects. A suspect that comes again is let in when every other suspect has either
    ended or brought its first token, so that a second crash mostly finds one alone. Whoever was there twice is refused;
    one that ends is none any more, and all is forgotten after ``RESTART_WINDOW`` seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # content -> (crashes, time of the last)
        self._running: dict[str, bytes] = {}  # ids of suspects that run -> content
        self._unproven: str | None = None  # the one of them that has not brought a token
        self._held: deque[EngineRequest] = deque()

    def crashed(self, running: Iterable[EngineRequest]) -> None:
        """The engine died while these ran. What was held is dropped."""
        now = self._clock()
        for request in running:
            key = _content(request)
            self._known[key] = (self._crashes(key) + 1, now)
            self._known.move_to_end(key)
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        self._running.clear()
        self._held.clear()
        self._unproven = None

    def admit(self, request: EngineRequest) -> bool:
        """Whether it may run now; if not, ``proven`` or ``ended`` hand it out later. Raises UsageError for one that ran
        in two crashes."""
        if not self._known:
            return True
        key = _content(request)
        crashes = self._crashes(key)
        if crashes >= 2:
            minutes = RESTART_WINDOW / 60
            raise UsageError(
                f"this request was running both times when the engine died; it is refused for {minutes:.0f} minutes"
            )
        if crashes == 0:
            return True
        if self._unproven is not None:
            self._held.append(request)
            return False
        self._enter(request, key)
        return True

    def proven(self, request_id: str) -> EngineRequest | None:
        """A request brought a token: the next suspect to send, if it was that one's turn."""
        return self._next() if request_id == self._unproven else None

    def ended(self, request_id: str) -> EngineRequest | None:
        """A request ended, and the engine lives: the next suspect to send."""
        key = self._running.pop(request_id, None)
        if key is not None:
            self._known.pop(key, None)
        return self.proven(request_id)

    def drop(self, request_id: str) -> bool:
        """Forget a request that is held; False if it is not."""
        found = next((r for r in self._held if r.id == request_id), None)
        if found is not None:
            self._held.remove(found)
        return found is not None

    def release(self, adapter: int) -> list[EngineRequest]:
        """Those held that use an adapter which is about to go: they are sent now, beside the others."""
        found = [request for request in self._held if request.adapter == adapter]
        for request in found:
            self._held.remove(request)
            self._running[request.id] = _content(request)
        return found

    def _enter(self, request: EngineRequest, key: bytes) -> None:
        self._running[request.id] = key
        self._unproven = request.id

    def _next(self) -> EngineRequest | None:
        self._unproven = None
        if not self._held:
            return None
        request = self._held.popleft()
        self._enter(request, _content(request))
        return request

    def _crashes(self, key: bytes) -> int:
        count, when = self._known.get(key, (0, 0.0))
        return count if self._clock() - when <= RESTART_WINDOW else 0


def _content(request: EngineRequest) -> bytes:
    """The same for requests that ask for the same, whoever does; seeds are mostly drawn by us and play no part."""
    told = {picture.digest for picture in request.pictures}  # as good as their pixels
    data = pack_add(replace(request, id="", session=None, whose=Whose(), params=replace(request.params, seed=0)), told)
    return hashlib.blake2b(data, digest_size=16).digest()
