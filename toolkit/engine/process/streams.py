"""The requests that a front end follows, until they have ended or nobody wants them any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from toolkit.engine.request import EngineOutput
from toolkit.engine.text.stream import RequestStream
from toolkit.errors import UsageError
from toolkit.messages import Response

log = logging.getLogger(__name__)


class Streams:
    """By the ids that requests have in the engine, and by the names that callers know them by; any thread may call. No
    id is used twice, as a name may be: what the engine still says of a request that was left is not for the next one.
    """

    def __init__(self) -> None:
        self._streams: dict[str, RequestStream] = {}
        self._ids: dict[str, str] = {}  # by name
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._streams)

    def id_of(self, name: str) -> str | None:
        """None where no request of that name is followed."""
        return self._ids.get(name)

    @property
    def busy(self) -> bool:
        """Whether the engine works on any; those who read them may take their time."""
        with self._lock:
            streams = list(self._streams.values())
        return any(not stream.engine_done for stream in streams)

    def follow(self, stream: RequestStream, send: Callable[[], None]) -> None:
        """Follow a request that ``send`` hands to the engine. Raises what that raises, then it is not followed; and
        UsageError where another of its name runs. ``fail_all`` either finds the request or comes before ``send``."""
        with self._lock:
            if stream.name in self._ids:
                raise UsageError(f"request id {stream.name!r} is already running")
            self._streams[stream.id], self._ids[stream.name] = stream, stream.id
            try:
                send()
            except BaseException:
                del self._streams[stream.id], self._ids[stream.name]
                raise

    def leave(self, stream: RequestStream) -> bool:
        """Follow it no more. Returns whether the engine still works on it."""
        followed = self._streams.pop(stream.id, None) is not None  # without the lock: a finalizer may call in its midst
        if followed:
            del self._ids[stream.name]
        return followed and not stream.engine_done

    def deliver(self, outputs: list[EngineOutput]) -> None:
        """Outputs of requests that have gone are dropped."""
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                stream.deliver(output)
                _wake(stream)

    def fail_all(self, text: str) -> None:
        """End each in the error ``text``."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.deliver(EngineOutput(stream.id, finish_reason="error", error=text, error_code=503))
            _wake(stream)


def _wake(stream: RequestStream) -> None:
    try:
        stream.wake()
    except RuntimeError:  # its event loop has been closed
        log.debug("request %s: nobody listens any more", stream.id)


def polled(stream: RequestStream) -> Response | None:
    """``poll``, and an error that ends this stream alone where it fails."""
    try:
        return stream.poll()
    except Exception as error:
        log.exception("request %s failed", stream.id)
        stream.ended = True
        return Response(finish_reason="error", error_code=500, error_message=str(error) or type(error).__name__)
