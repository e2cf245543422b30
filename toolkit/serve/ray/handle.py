"""A model's replicas, reached through a handle of Ray Serve."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from toolkit.serve.ray.asked import Asked
from toolkit.serve.ray.front import LOOK_S, Busy, Gone
from toolkit.serve.ray.replica import Message

logger = logging.getLogger("toolkit.serve")


class Handle:
    """Implements ``front.Replicas``."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streams: Any = handle.options(stream=True, method_name="answer")
        self._metrics: Sequence[tuple[str, bytes]] = []  # as they were last

    async def stream(self, asked: Asked) -> AsyncGenerator[list[Message], None]:
        streams = self._streams.options(session_id=asked.session) if asked.session else self._streams
        response = streams.remote(asked)
        try:
            async for messages in response:
                yield messages
        except BackPressureError as error:
            raise Busy(_first_line(error)) from None
        except (RayError, DeploymentUnavailableError) as error:  # its process has ended, perhaps between two messages
            raise Gone(_first_line(error)) from None
        except BaseException:  # who has asked is gone
            response.cancel()
            raise

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        response = self._handle.broadcast("metrics")
        try:
            found = await response.results_async(timeout_s=LOOK_S, return_exceptions=True)
        except TimeoutError:
            logger.warning("/metrics: a replica has not answered within %g s; all are as they were before", LOOK_S)
            return self._metrics
        self._metrics = [one for one in found if not isinstance(one, BaseException)]
        return self._metrics


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
