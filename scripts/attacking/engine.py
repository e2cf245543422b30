"""What happens to the engine itself: stopped, killed, its file cut."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from attacking.target import Target


def stopped_engine(target: Target) -> Iterator[str]:
    """A large request waits for an engine that stands still; then it is found out and restarted."""
    os.kill(target.worker, signal.SIGSTOP)
    yield target.post({"prompt": [7] * 1000, "bad_words": [f"word{i:05d}" * 20 for i in range(4000)]})
    yield target.wait(200, 60)


def killed_engine(target: Target) -> Iterator[str]:
    os.kill(target.worker, signal.SIGKILL)
    yield target.wait(503, 5)
    yield target.wait(200, 60)


def truncated_file(target: Target) -> Iterator[str]:
    file = max(target.model.iterdir(), key=lambda f: f.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    yield target.post({"prompt": "x", "max_tokens": 50})
    with contextlib.suppress(ProcessLookupError):
        os.kill(target.worker, signal.SIGKILL)  # what it has read already it could go on with
    yield target.wait(503, 90, restarting=False)
    yield target.post({"prompt": "x"})
