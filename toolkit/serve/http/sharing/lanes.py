"""Where work is done whose time grows with a request: in threads, large requests in a lane of their own; in each lane
users take turns."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from toolkit.base import libc
from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import spelled
from toolkit.serve.http.access.users import current_user
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.sharing.places import Places

T = TypeVar("T")
LARGE = 1 << 18  # bytes or characters from which on requests are handled one after the other
FETCHING = 16  # requests whose pictures are fetched at once: their threads wait for other hosts
VIDEOS = 2  # videos at once: each has its frames in memory, and a core decodes it
PICTURES = 2  # pictures that are decoded at once
LARGE_PICTURE = 1 << 24  # pixels from which on they are decoded one after the other: more than a camera's
USED = 1 << 23  # bytes of pictures that a request had, from which on its memory is handed back


@dataclass
class Used:
    """Bytes that a request's ``body`` and ``pictures`` took."""

    body: int = 0
    pictures: int = 0


_used: contextvars.ContextVar[Used] = contextvars.ContextVar("used")


class Lane:
    """``count`` threads. Work for users who have little here comes before that of those who have much."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"toolkit-{name}")
        self._places = Places(count)

    async def run(self, work: Callable[[], T]) -> T:
        """``work()``. It has its thread to its end, though the caller may go before."""
        loop, user = asyncio.get_running_loop(), current_user().id
        await self._places.take(user)

        def leave(_: Future[T]) -> None:
            try:
                loop.call_soon_threadsafe(self._places.leave, user)
            except RuntimeError:  # its event loop has been closed: nobody waits
                self._places.leave(user)

        done = self._pool.submit(work)
        done.add_done_callback(leave)
        return await asyncio.wrap_future(done)

    def behind(self, work: Callable[[], object]) -> None:
        """``work()``, once a thread is free, whoever waits."""
        self._pool.submit(work)


class Lanes:
    """Threads of one server. A large request never waits in front of a small one, and a core is all that large ones
    take together. What waits for other hosts holds up neither, nor do pictures and videos: each of a request's is
    a piece of work by itself, so that requests with many take turns."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._small, self._large = Lane(4, "requests"), Lane(1, "large-requests")
        self._fetching = Lane(FETCHING, "fetching")
        self._pictures, self._large_pictures = Lane(PICTURES, "pictures"), Lane(1, "large-pictures")
        self._videos = Lane(VIDEOS, "videos")

    async def run(self, work: Callable[[], T], size: int) -> T:
        """``work()``, by the ``size`` of the request. It sees the caller's context. Raises ApiError where it is not
        done within ``prompt_timeout``: 400 if the work took it, 503 if it waited for others' all the while."""
        return await self._run(self._large if size > LARGE else self._small, work, self._limits.prompt_timeout)

    async def fetch(self, work: Callable[[], T], seconds: float) -> T:
        """``work()``, which waits for another host. Raises as ``run``, after so many ``seconds``."""
        return await self._run(self._fetching, work, seconds)

    async def decode(self, work: Callable[[], T], pixels: int, seconds: float, *, video: bool = False) -> T:
        """``work()``, which decodes a picture of so many ``pixels``, or a ``video``. Raises as ``run``, after so many
        ``seconds``."""
        by_size = self._large_pictures if pixels > LARGE_PICTURE else self._pictures
        return await self._run(self._videos if video else by_size, work, seconds)

    async def _run(self, lane: Lane, work: Callable[[], T], seconds: float) -> T:
        began = False

        def begin() -> T:
            nonlocal began
            began = True
            return work()

        context = contextvars.copy_context()
        try:
            async with asyncio.timeout(seconds):
                return await lane.run(lambda: context.run(begin))
        except TimeoutError as error:
            limit = f"{self._limits.prompt_timeout:g} s (the server's {spelled('prompt_timeout')})"
            text = f"the request was not read and tokenized within {limit}"
            raise ApiError(400 if began else 503, text, code="prompt_timeout") from error

    @contextmanager
    def request(self) -> Iterator[Used]:
        """Inside, a request is answered; what it took is told there, and handed back behind it where it was much."""
        told = Used()
        before = _used.set(told)
        try:
            yield told
        finally:
            _used.reset(before)
            if told.body > LARGE or told.pictures > USED:
                self.give_back()

    def used(self, pictures: int) -> None:
        """The request that is answered here has had so many more bytes of ``pictures``."""
        if (told := _used.get(None)) is not None:
            told.pictures += pictures

    def give_back(self) -> None:
        """Hand memory that was freed back to the system, behind the work that waits."""
        trim = libc.function("malloc_trim")
        if trim is not None:
            self._large.behind(lambda: trim(0))
