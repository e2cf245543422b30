"""The thread that puts blocks on a shelf, and leaves the processor to requests while some run."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from toolkit.base.threads import give_way
from toolkit.engine.cache.kept.block import Block, Buffer
from toolkit.engine.cache.kept.shelf import Shelf
from toolkit.runners.base import RunnerError

if TYPE_CHECKING:
    from toolkit.runners.base import Runner

log = logging.getLogger(__name__)
GROUP = 16 << 20  # bytes that go to disk together
QUEUE = 64 << 20  # bytes that may wait
REST = 100  # while requests run, so many times as long as it has worked: beside one step, not in all of them


class Writer:
    """Blocks go in by ``take``, which waits for no disk; ask ``room`` first. ``gently``: requests come first."""

    def __init__(self, shelf: Shelf, gently: bool = True) -> None:
        self._shelf = shelf
        self._gently = gently
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Block, Buffer]] = deque()
        self._size = 0  # of what waits or is being written
        self._spent = 0.0  # seconds that others have worked for it
        self._written: dict[int, list[memoryview]] = {}  # memory, by groups: new one costs more than the copy
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def room(self) -> bool:
        """Whether it should be given more."""
        return self._size < (GROUP if self._busy else QUEUE)

    def take(self, block: Block, runner: Runner, at: int, what: str) -> bool:
        """Have it written as it is in ``runner``'s block ``at`` now. Whether it could be read; if not, the log says
        that it cannot be ``what``."""
        begun = time.perf_counter()
        try:
            data = runner.export_block(block.group, at, self._used(block.group))
        except RunnerError as error:
            log.warning("a KV block cannot be %s: %s", what, error)
            return False
        seconds = time.perf_counter() - begun
        with self._changed:
            self._waiting.append((block, data))
            self._size += len(data)
            self._spent += seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="toolkit-kept", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def _used(self, group: int) -> memoryview | None:
        """Memory of a block that is written."""
        with self._changed:
            written = self._written.get(group)
            return written.pop() if written else None

    def tell(self, busy: bool) -> None:
        """Whether requests run."""
        if busy != self._busy:
            with self._changed:
                self._busy = busy
                self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until all is written, at most so long."""
        self.tell(busy=False)
        with self._changed:
            self._changed.wait_for(lambda: not self._size, seconds)

    def close(self) -> None:
        """What still waits is not written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._gently:
            give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                group: list[tuple[Block, Buffer]] = []
                size = 0
                while self._waiting and size < GROUP:
                    group.append(self._waiting.popleft())
                    size += len(group[-1][1])
                spent, self._spent = self._spent, 0.0
            begun = time.thread_time()
            self._shelf.write(group)
            with self._changed:
                held = sum(len(data) for written in self._written.values() for data in written)
                for block, data in group:
                    if isinstance(data, memoryview) and (held := held + len(data)) <= GROUP:
                        self._written.setdefault(block.group, []).append(data)
            group.clear()
            spent += time.thread_time() - begun
            with self._changed:
                self._size -= size
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._busy or self._closed, REST * spent)
