"""API keys of a server, and the file that they may come from."""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.user_path import user_path
from toolkit.errors import UsageError

logger = logging.getLogger("toolkit.serve")
FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class KeyRules:
    """What the operator says of one key, in its line of the file; None = as the server's options say.

    ``weight``: its part of the machine beside others'. ``share``: of all places in the batch that it may have at most.
    ``requests``: that may be answered at once. ``tokens_per_minute``: of prompts and answers. ``priority``: the lowest
    (the most urgent) that its requests may have.
    """

    name: str = ""
    weight: float = 1.0
    share: float | None = None
    requests: int | None = None
    tokens_per_minute: int | None = None
    priority: int | None = None

    WHOLE: ClassVar[tuple[str, ...]] = ("requests", "tokens_per_minute", "priority")
    BOUNDS: ClassVar[Mapping[str, tuple[float, float]]] = {
        "weight": (0.01, 100),
        "share": (0.01, 1),
        "requests": (1, 1 << 20),
        "tokens_per_minute": (1, 1 << 40),
        "priority": (-100, 100),
    }

    def checked(self, where: str) -> KeyRules:
        """Itself. Raises UsageError, which says ``where`` they stand, for what is out of bounds."""
        if self.name and not _NAME.fullmatch(self.name):
            raise UsageError(f"{where}: name: expected up to 64 letters, digits and ._-, found {self.name!r:.80}")
        for name, (low, high) in self.BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{where}: {name}: expected {low:g} to {high:g}, found {value!r:.40}")
        return self


_NAME = re.compile(r"[\w.-]{1,64}")


class ApiKeys:
    """Those ``given`` and those in ``file``, one a line, which may go on with what the operator says of it, such as
    ``name=alice weight=2 tokens-per-minute=60000``; false where there are none, so that nobody is asked for one.

    The file is read again when it changes, unless it is a pipe. What cannot be read, or holds no key, changes nothing
    and is logged once.
    Raises UsageError for a file that is so from the start, and for an empty key.
    """

    def __init__(self, given: Sequence[str] = (), file: str | Path | None = None) -> None:
        if not all(key.strip() for key in given):
            raise UsageError("api_keys: expected non-empty keys, found an empty one")
        self._given = [key.encode() for key in given]
        self._file = None if file is None else user_path(file)
        self._seen = self._mark()
        self._in_file: dict[bytes, KeyRules] = {} if self._file is None else _read(self._file)

    def __len__(self) -> int:
        return len({*self._given, *self._in_file})

    @property
    def first(self) -> str | None:
        """One of them, for a client of ours."""
        return next((key.decode(errors="replace") for key in (*self._given, *self._in_file)), None)

    def rules(self, key: bytes) -> KeyRules:
        """What the file says of ``key``."""
        return self._in_file.get(key, KeyRules())

    def matching(self, tokens: Sequence[str]) -> bytes | None:
        """The key that one of ``tokens``, as headers have them, is."""
        self._refresh()
        keys = [*self._given, *self._in_file]
        # Every key is compared, each in constant time, so that timing tells nothing about any of them.
        given = [token.encode("latin-1", "replace") for token in tokens]
        matches = [key for token in given for key in keys if hmac.compare_digest(token, key)]
        return matches[0] if matches else None

    def _refresh(self) -> None:
        if self._file is None or (mark := self._mark()) == self._seen:
            return
        self._seen = mark
        try:
            if not mark:
                raise UsageError(f"--api-key-file {self._file}: no longer a file")
            self._in_file = _read(self._file)
        except UsageError as error:
            logger.error("%s; the keys read before stay valid", error)
        else:
            logger.info("--api-key-file: read again, %d keys", len(self._in_file))

    def _mark(self) -> tuple[int, ...]:
        """What tells one state of the file from another; empty where none is there, or it can be read but once."""
        try:
            found = os.stat(self._file or "")
        except OSError:
            return ()
        if not stat.S_ISREG(found.st_mode):
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def _read(file: Path) -> dict[bytes, KeyRules]:
    """The keys in a file, with what it says of each: its lines but empty ones and those that begin with #. Raises
    UsageError."""
    try:
        with file.open("rb") as source:
            data = source.read(FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--api-key-file {file}: cannot be read ({error.strerror}); name a file of keys") from error
    if len(data) > FILE_BYTES:
        raise UsageError(f"--api-key-file {file}: expected one key a line, found more than {FILE_BYTES:,} bytes")
    keys = {}
    for number, line in enumerate(data.splitlines(), 1):
        key, *words = line.split()[:16] or [b"#"]
        if not key.startswith(b"#"):
            keys[key] = _rules(f"--api-key-file {file}, line {number}", [word.decode("latin-1") for word in words])
    if not keys:
        raise UsageError(f"--api-key-file {file}: expected one key a line, found none")
    return keys


def _rules(where: str, words: list[str]) -> KeyRules:
    """What stands behind a key. Raises UsageError; it tells nothing of the key."""
    known = {f.name.replace("_", "-"): f.name for f in fields(KeyRules)}
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("#"):
            break
        spelled, _, value = word.partition("=")
        if spelled not in known or not value:
            raise UsageError(
                f"{where}: behind the key expected {', '.join(f'{k}=…' for k in known)}, found {word!r:.40}"
            )
        name = known[spelled]
        kind = str if name == "name" else int if name in KeyRules.WHOLE else float
        try:
            found[name] = kind(value)
        except ValueError:
            raise UsageError(f"{where}: {spelled}: expected a number, found {value!r:.40}") from None
    return replace(KeyRules(), **found).checked(where)
