"""An answer while it is generated, in its turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from toolkit.messages import Response
from toolkit.parsers.pieces import Piece
from toolkit.serve.generation.chat import Chat
from toolkit.serve.generation.plain import Plain


@asynccontextmanager
async def running(run: Chat | Plain) -> AsyncIterator[AsyncGenerator[tuple[int, Response, list[Piece]], None]]:
    """The deltas of ``run``, which has waited for its place and is prepared; the place is free once they are left."""
    async with run.state.slot():
        await run.prepare()
        async with aclosing(run.deltas()) as stream:
            yield stream
