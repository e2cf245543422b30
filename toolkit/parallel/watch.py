"""Ends a rank's wait for its device when another rank is gone or stands still.

Messages that are queued on a device fail nobody: a kernel waits there for the other rank, and the host for the kernel.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Sequence

from toolkit.parallel.group import Group

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.2  # after which it looks whether a step takes too long
BACK_SECONDS = 15.0  # in which the device lets go of a message that was ended


class Watch:
    """A thread that breaks ``group`` when one of ``ends``, descriptors of connections to other ranks, hangs up, or when
    a step has not come to its next message for ``seconds``. If the device does not let go even then, the process ends.
    """

    def __init__(self, group: Group, ends: Sequence[int], seconds: float) -> None:
        self._group, self._seconds = group, seconds
        self._poll = select.poll()
        for end in ends:
            self._poll.register(end, select.POLLRDHUP)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """To be called before ``ends`` are closed."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            gone, since = self._poll.poll(1000 * LOOK_SECONDS), self._group.since
            if gone:
                return self._end("a rank has hung up")
            if since is not None and time.monotonic() - since > self._seconds:
                return self._end(f"no rank has gone on for {self._seconds:g} s")

    def _end(self, why: str) -> None:
        # in a thread, for it may wait for the device as well
        threading.Thread(target=self._group.abort, args=(why,), daemon=True).start()
        until = time.monotonic() + BACK_SECONDS
        while not self._stopped.wait(0.05) and self._group.since is not None:
            if time.monotonic() > until:
                log.critical("%s, and the device does not end the message that waits for it: this process ends", why)
                os._exit(1)
