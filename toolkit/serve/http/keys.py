"""API keys of a server, and the file that they may come from."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import UsageError

logger = logging.getLogger("toolkit.serve")
FILE_BYTES = 1 << 20


class ApiKeys:
    """Those ``given`` and those in ``file``, one a line; false where there are none, so that nobody is asked for one.

    The file is read again when it changes, unless it is a pipe. What cannot be read, or holds no key, changes nothing
    and is logged once.
    Raises UsageError for a file that is so from the start, and for an empty key.
    """

    def __init__(self, given: Sequence[str] = (), file: str | Path | None = None) -> None:
        if not all(key.strip() for key in given):
            raise UsageError("api_keys: expected non-empty keys, found an empty one")
        self._given = [key.encode() for key in given]
        self._file = None if file is None else Path(file).expanduser()
        self._seen = self._mark()
        self._in_file = [] if self._file is None else _read(self._file)

    def __bool__(self) -> bool:
        return bool(self._given or self._in_file)

    @property
    def first(self) -> str | None:
        """One of them, for a client of ours."""
        return next((key.decode(errors="replace") for key in (*self._given, *self._in_file)), None)

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


def _read(file: Path) -> list[bytes]:
    """The keys in a file: its lines but empty ones and those that begin with #. Raises UsageError."""
    try:
        with file.open("rb") as source:
            data = source.read(FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--api-key-file {file}: cannot be read ({error.strerror}); name a file of keys") from error
    if len(data) > FILE_BYTES:
        raise UsageError(f"--api-key-file {file}: expected one key a line, found more than {FILE_BYTES:,} bytes")
    keys = [line for part in data.splitlines() if (line := part.strip()) and not line.startswith(b"#")]
    if not keys:
        raise UsageError(f"--api-key-file {file}: expected one key a line, found none")
    return keys
