"""Progress of many answers, for ``use_tqdm``."""

from __future__ import annotations


class Progress:
    """A bar on standard error that counts finished requests."""

    def __init__(self, total: int) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(console=Console(stderr=True))
        self._task = self._bar.add_task("answers", total=total)
        self._bar.start()

    def advance(self) -> None:
        self._bar.advance(self._task)

    def stop(self) -> None:
        self._bar.stop()
