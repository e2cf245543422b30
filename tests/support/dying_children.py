"""Processes that are killed as soon as they have been started: by the kernel, for want of memory."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.base import child_process


def kill_children(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """Until ``monkeypatch`` is undone. ``gone``: they are so before anything is said to them."""
    start = child_process.start

    def killed(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        process.kill()
        if gone:
            process.wait()
        return process

    monkeypatch.setattr(child_process, "start", killed)
