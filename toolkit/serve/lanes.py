"""Where work is done whose time grows with a request: in threads, large requests in a lane of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from toolkit import libc
from toolkit.serve.errors import ApiError
from toolkit.serve.limits import Limits, option

T = TypeVar("T")
LARGE = 1 << 18  # bytes or characters from which on requests are handled one after the other


class Lanes:
    """Threads of one server. A large request never waits in front of a small one, and a core is all that large ones
    take together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._small = ThreadPoolExecutor(4, thread_name_prefix="toolkit-requests")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="toolkit-large-requests")

    async def run(self, work: Callable[[], T], size: int) -> T:
        """``work()``, by the ``size`` of the request. Raises ApiError where it is not done within ``prompt_timeout``:
        400 if the work took it, 503 if it waited for others' all the while."""
        began = False

        def begin() -> T:
            nonlocal began
            began = True
            return work()

        pool = self._large if size > LARGE else self._small
        seconds = self._limits.prompt_timeout
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(pool, begin)
        except TimeoutError as error:
            limit = option("prompt_timeout")
            text = f"the request was not read and tokenized within {seconds:g} s (the server's {limit})"
            raise ApiError(400 if began else 503, text, code="prompt_timeout") from error

    def give_back(self) -> None:
        """Hand memory that was freed back to the system, behind the work that waits."""
        trim = libc.function("malloc_trim")
        if trim is not None:
            self._large.submit(trim, 0)
