"""What is known of the lines of a batch, however many: which are answered, and which names are taken."""

from __future__ import annotations

import sqlite3
from hashlib import blake2b

_BIG = 1 << 63


class Seen:
    """Kept in a temporary file of which some MiB are in memory."""

    def __init__(self) -> None:
        # "": a file of SQLite's own that goes with it
        self._rows = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for text in (
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            "PRAGMA cache_size = -16384",
            "CREATE TABLE done (number INTEGER PRIMARY KEY, digest TEXT)",
            "CREATE TABLE names (name INTEGER PRIMARY KEY, number INTEGER)",
            "BEGIN",
        ):
            self._rows.execute(text)
        self.any_done = False

    def answered(self, number: int, digest: str) -> bool:
        """Note that the line ``number``, of this digest, has its answer; false where it had one."""
        self.any_done = True
        return self._rows.execute("INSERT OR IGNORE INTO done VALUES (?, ?)", (number, digest)).rowcount > 0

    def digest(self, number: int) -> str | None:
        """That of an answered line; None where it has no answer."""
        if not self.any_done:
            return None
        row = self._rows.execute("SELECT digest FROM done WHERE number = ?", (number,)).fetchone()
        return None if row is None else row[0]

    def last(self) -> int:
        """The highest number of an answered line, or 0."""
        return self._rows.execute("SELECT MAX(number) FROM done").fetchone()[0] or 0

    def first_with(self, name: str, number: int) -> int:
        """The line that had ``name`` first: ``number`` itself where none had it."""
        key = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()) - _BIG
        if self._rows.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", (key, number)).rowcount > 0:
            return number
        return self._rows.execute("SELECT number FROM names WHERE name = ?", (key,)).fetchone()[0]

    def close(self) -> None:
        self._rows.close()
