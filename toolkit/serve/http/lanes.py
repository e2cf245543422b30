"""Where work is done whose time grows with a request: in threads, large requests in a lane of their own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from toolkit.base import libc
from toolkit.configs.option import spelled
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits

T = TypeVar("T")
LARGE = 1 << 18  # bytes or characters from which on requests are handled one after the other
FETCHING = 16  # requests whose pictures are fetched at once: their threads wait for other hosts
VIDEOS = 2  # requests with videos at once: each has the frames of one in memory, and a core decodes it


class Lanes:
    """Threads of one server. A large request never waits in front of a small one, and a core is all that large ones
    take together. What waits for other hosts holds up neither, nor do videos."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._small = ThreadPoolExecutor(4, thread_name_prefix="toolkit-requests")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="toolkit-large-requests")
        self._fetching = ThreadPoolExecutor(FETCHING, thread_name_prefix="toolkit-fetching")
        self._videos = ThreadPoolExecutor(VIDEOS, thread_name_prefix="toolkit-videos")

    async def run(self, work: Callable[[], T], size: int, *, fetches: bool = False, decodes: bool = False) -> T:
        """``work()``, by the ``size`` of the request, whether it ``fetches`` from other hosts and whether it
        ``decodes`` videos. It sees the caller's context. Raises ApiError where it is not done within
        ``prompt_timeout``: 400 if the work took it, 503 if it waited for others' all the while."""
        began = False

        def begin() -> T:
            nonlocal began
            began = True
            return work()

        by_size = self._large if size > LARGE else self._small
        pool = self._videos if decodes else self._fetching if fetches else by_size
        context = contextvars.copy_context()
        seconds = self._limits.prompt_timeout
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(pool, context.run, begin)
        except TimeoutError as error:
            limit = spelled("prompt_timeout")
            text = f"the request was not read and tokenized within {seconds:g} s (the server's {limit})"
            raise ApiError(400 if began else 503, text, code="prompt_timeout") from error

    def give_back(self) -> None:
        """Hand memory that was freed back to the system, behind the work that waits."""
        trim = libc.function("malloc_trim")
        if trim is not None:
            self._large.submit(trim, 0)
