"""Adapters that come and go while the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.manifest import content_digest
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import RunnerError

if TYPE_CHECKING:
    from toolkit.runners.base import Runner


class Adapters:
    """Those of one runner. ``digests``: of the first ones' content, where blocks of their requests are kept or go to
    other engines, whose numbers stand for other adapters."""

    def __init__(self, runner: Runner, digests: Sequence[str]) -> None:
        self._runner = runner
        self._digests = dict(enumerate(digests))
        first = runner.options.adapters if digests else ()
        self._paths = {number: Path(path) for number, (_, path) in enumerate(first) if path}
        self._leaving: set[int] = set()
        self._digester = ThreadPoolExecutor(1, "adapter-digests")
        self._coming: dict[int, Future[str]] = {}  # digests of those that ``load`` is to take in

    def read(self, number: int, path: Path, digest: bool) -> bool:
        """Whether ``load`` with the same arguments takes no time: until then other threads read the files, while steps
        run. What is wrong with them, ``load`` tells."""
        ask = getattr(self._runner, "read_adapter", None)
        if ask is None or not ask(number, path):
            return ask is None
        if digest and number not in self._coming:
            self._coming[number] = self._digester.submit(content_digest, path)
        return not digest or self._coming[number].done()

    def load(self, number: int, path: Path, digest: bool) -> None:
        """Take in the one in the directory ``path``, as ``number``. Raises ToolkitError where it cannot be read or fits
        another model, UsageError where the runner takes none in. ``digest``: its content is to tell it from others."""
        add = getattr(self._runner, "add_adapter", None)
        if add is None:
            raise UsageError("adapters: this backend takes them at the start alone (--adapters); restart the server")
        coming = self._coming.pop(number, None)
        try:
            add(number, path)
        except RunnerError as e:
            raise ToolkitError(f"{path}: {e}") from e
        if digest:
            try:
                self._digests[number] = content_digest(path) if coming is None else coming.result()
            except ToolkitError:  # nobody can name it
                self._runner.remove_adapter(number)  # type: ignore[attr-defined]  # it has taken it in
                raise
            self._paths[number] = path

    def look_again(self) -> None:
        """The runner is about to read them all again: their files may be others than before. Raises ToolkitError."""
        self._digests = {number: content_digest(path) for number, path in self._paths.items()}

    def unload(self, number: int) -> None:
        """Have it leave with the next ``drop`` that nobody uses it at. UsageError where the runner keeps them all."""
        if not hasattr(self._runner, "remove_adapter"):
            raise UsageError("adapters: this backend keeps those it was started with; restart the server without it")
        self._leaving.add(number)

    @property
    def leaving(self) -> bool:
        """Whether ``drop`` has anything to do."""
        return bool(self._leaving)

    def drop(self, used: set[int]) -> None:
        """Forget those that leave and are not in use."""
        for number in self._leaving - used:
            self._runner.remove_adapter(number)  # type: ignore[attr-defined]  # it has taken it in
            self._leaving.discard(number)
            self._digests.pop(number, None)
            self._paths.pop(number, None)

    def ready(self, number: int, seconds: float = 0.0) -> bool:
        """Whether a step can use it at once, perhaps within this time. One that memory does not hold is being read
        meanwhile; what is wrong with it, the step will tell."""
        ask = getattr(self._runner, "adapter_ready", None)
        return number < 0 or ask is None or bool(ask(number, seconds))

    def told(self, number: int) -> int | str:
        """What tells its blocks from others'."""
        return self._digests.get(number, number)
