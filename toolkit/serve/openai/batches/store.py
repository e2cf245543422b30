"""Files of a server's clients, and the records of their batches, in one directory."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, TypeVar

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import plain, read
from toolkit.base.user_path import user_path
from toolkit.base.whole_file import write_whole
from toolkit.configs.option import spelled
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.batches import leftovers
from toolkit.serve.openai.batches.leftovers import FOLDERS, LOCK, SALT

log = logging.getLogger(__name__)
R = TypeVar("R")
_ID = re.compile(r"(file|batch)-[0-9a-f]{24}|batch_[0-9a-f]{24}|(resp|talk)_[0-9a-f]{32}")
_WHAT = {"max_files": "files", "max_files_bytes": "bytes of files"}


class StorageFull(Exception):
    """There is no room for what a batch writes; the message says which limit it is."""


@dataclass(frozen=True)
class Stored:
    """A file; ``owner``: see ``FileStore.owner``. Times are in seconds since 1970."""

    id: str
    owner: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int

    def card(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        told = {name: value for name, value in vars(self).items() if name != "owner"}
        return {**told, "object": "file", "status": "processed", "status_details": None}


class FileStore:
    """``directory``: None = a temporary one, made when something is to be kept and removed at the end. No other server
    may have it. Raises UsageError, ToolkitError where it cannot be used.

    Whatever is kept is whole: files and records are renamed when they are, and on disk. No thread waits for that but
    the one that writes records.
    """

    def __init__(self, directory: Path | None, limits: Limits) -> None:
        self.limits = limits
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._root: Path | None = None
        self._lock: IO[bytes] | None = None
        self._salt = secrets.token_bytes(32)
        self._files: dict[str, Stored] = {}  # the oldest first
        self._growing: dict[str, tuple[str, int]] = {}  # owner and bytes of each that is not kept yet
        self._unread = False  # whether there are records that could not be read
        self.shared: Callable[[], bool] = lambda: True  # whether there may be other keys than an owner's own
        self.lasting = directory is not None
        self._writer = ThreadPoolExecutor(1, "toolkit-records")  # of records, in their order
        self.in_use: Callable[[str], bool] = lambda id: False  # whether a file has to stay although its time is over
        if directory is not None:
            self._open(user_path(directory))
        else:
            self._writer.submit(leftovers.clear, Path(tempfile.gettempdir()))

    def _open(self, root: Path) -> None:
        try:
            for folder in (root, *(root / name for name in FOLDERS)):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (root / LOCK).open("ab")
            salt = root / SALT
            if not salt.exists():
                write_whole(salt, self._salt, 0o600)
            self._salt = salt.read_bytes()
        except OSError as error:
            raise UsageError(
                f"--batch-dir {root}: cannot be used ({error.strerror}); name another directory"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ToolkitError(f"--batch-dir {root}: another server uses it; name another directory") from error
        self._root = root
        found = sorted(self.records("files", Stored), key=lambda file: file.created_at)
        self._files = {file.id: file for file in found if self.path(file.id).exists()}

    @property
    def root(self) -> Path:
        """Raises ApiError where no temporary one can be made."""
        if self._root is None:
            try:
                self._temporary = tempfile.TemporaryDirectory(prefix=leftovers.PREFIX, ignore_cleanup_errors=True)
            except OSError as error:
                raise no_room(error) from error
            self._open(Path(self._temporary.name))
        assert self._root is not None
        return self._root

    def close(self) -> None:
        """Let go of the directory, once all is written; a temporary one is removed."""
        self._writer.shutdown()
        if self._lock is not None:
            self._lock.close()
        if self._temporary is not None:
            self._temporary.cleanup()
        self._root = self._lock = self._temporary = None

    def owner(self, key: bytes) -> str:
        """What stands for an API key in records: none can be told from it. "" where no key is asked for."""
        return blake2b(key, digest_size=16, key=self._salt).hexdigest() if key else ""

    # Files ----------------------------------------------------------------------------------------------------------

    def path(self, id: str) -> Path:
        """Where the text of a file is."""
        assert _ID.fullmatch(id)
        return self.root / "files" / id

    def files(self, owner: str) -> list[Stored]:
        """The oldest first."""
        self._expire()
        return [file for file in self._files.values() if file.owner == owner]

    def file(self, id: str, owner: str) -> Stored | None:
        self._expire()
        found = self._files.get(id)
        return found if found is not None and found.owner == owner else None

    def check_room(self, owner: str, size: int) -> None:
        """Raise ApiError where another file of ``size`` bytes is too many; of a key also where it would have more than
        it leaves to others, so that there is always room for one who has less."""
        self._expire()
        self._check("max_files", 1, owner)
        self._check("max_files_bytes", size, owner)

    def _check(self, name: str, more: int, owner: str) -> None:
        """Of one limit."""
        limits, what = self.limits, _WHAT[name]
        kept = Counter[str]()
        for file in self._files.values():
            kept[file.owner] += file.bytes if name == "max_files_bytes" else 1
        if name == "max_files_bytes":
            for whose, count in self._growing.values():
                kept[whose] += count
        used, mine, most = kept.total(), kept[owner], getattr(limits, name)
        if used + more > most:
            raise limits.refusal(name, None, used + more, f"{what} together (delete some)")
        if owner and mine and mine + more > (left := most - used) and self.shared():
            option = f"{spelled(name)} ({most:,})"
            told = f"found {mine + more:,} {what} of this key, expected at most the {left:,} that are free"
            raise ApiError(400, f"{told} of the server's {option}; delete some", code="limit_exceeded")

    async def add(self, source: IO[bytes], owner: str, filename: str, purpose: str, seconds: float) -> Stored:
        """Keep a copy of ``source`` for so many seconds. It is made in a thread; between the look for room and its
        being kept comes nothing else. Raises ApiError."""
        id = new_id("file-")
        path = self.path(id)
        part = path.with_suffix(".part")
        try:
            await asyncio.to_thread(_copy, source, part, self.lasting)
            self.check_room(owner, part.stat().st_size)
            part.replace(path)
            file = self.register(id, owner, filename, purpose, seconds)
            await self.save("files", file)
            return file
        except BaseException as error:
            part.unlink(missing_ok=True)
            self.drop(id)
            if isinstance(error, OSError):
                raise no_room(error) from error
            raise

    def register(self, id: str, owner: str, filename: str, purpose: str, seconds: float) -> Stored:
        """Keep what was written under ``id``; its record is to be saved."""
        now = int(time.time())
        size = self.path(id).stat().st_size
        file = Stored(id, owner, size, now, filename, purpose, now + int(seconds))
        self._files[id] = file
        self._growing.pop(id, None)
        return file

    def grow(self, id: str, size: int, owner: str) -> None:
        """Note that so many bytes are about to be added to a file of ``owner`` that is not kept yet. Raises
        StorageFull where ``check_room`` would refuse them."""
        try:
            self._check("max_files_bytes", size, owner)
        except ApiError as error:
            raise StorageFull(str(error)) from error
        self._growing[id] = owner, self._growing.get(id, ("", 0))[1] + size

    def drop(self, id: str) -> None:
        """Forget a file."""
        self._files.pop(id, None)
        self._growing.pop(id, None)
        self.forget_later("files", id)
        self.path(id).unlink(missing_ok=True)

    def _expire(self) -> None:
        now = time.time()
        for file in [file for file in self._files.values() if file.expires_at <= now]:
            if not self.in_use(file.id):
                self.drop(file.id)

    def tidy(self, used: set[str]) -> None:
        """Remove files that were begun and never kept, but those ``used``. None where a record could not be read, which
        may use some."""
        if self._root is None or self._unread:
            return
        for path in (self._root / "files").iterdir():
            id = path.name.partition(".")[0]
            if _ID.fullmatch(id) and id not in self._files and id not in used:  # others' files are none of ours
                path.unlink(missing_ok=True)

    # Records --------------------------------------------------------------------------------------------------------

    async def save(self, folder: str, record: Any) -> None:
        """Keep a record under its id, and wait until it is on disk. Raises OSError."""
        await asyncio.wrap_future(self._writer.submit(self._save, folder, record))

    def save_later(self, folder: str, record: Any) -> None:
        """Likewise, soon: ``record`` is to stay as it is. What cannot be written is said in the log."""
        self._later(partial(self._save, folder, record))

    def forget_later(self, folder: str, id: str) -> None:
        self._later(partial(self._forget, folder, id))

    def _save(self, folder: str, record: Any) -> None:
        write_whole(self.root / folder / f"{record.id}.json", json.dumps(plain(record)).encode(), 0o600)

    def _later(self, work: Callable[[], None]) -> None:
        def done() -> None:
            try:
                work()
            except (OSError, TypeError, ValueError) as error:
                log.warning("--batch-dir %s: %s", self._root, error)

        self._writer.submit(done)

    def _forget(self, folder: str, id: str) -> None:
        assert _ID.fullmatch(id)
        (self.root / folder / f"{id}.json").unlink(missing_ok=True)

    def records(self, folder: str, kind: type[R]) -> list[R]:
        """All of a folder, whose names are ids. One that cannot be read stays as it is, and is said in the log."""
        found: list[R] = []
        for path in [] if self._root is None else sorted((self._root / folder).glob("*.json")):
            if _ID.fullmatch(path.stem):
                try:
                    found.append(read(kind, json.loads(path.read_bytes())))
                except (OSError, ValueError) as error:
                    log.warning("%s: no record of this server's (%s), and is not used; remove it", path, error)
                    self._unread = True
        return found


def no_room(error: OSError) -> ApiError:
    """What clients are told where nothing can be written."""
    return ApiError(500, f"files cannot be kept here ({error.strerror}); --batch-dir says where", code="storage_full")


def new_id(kind: str) -> str:
    return kind + secrets.token_hex(12)


def named(found: R | None, what: str, id: str) -> R:
    """``found``, or ApiError 404."""
    if found is None:
        raise ApiError(404, f"no such {what}: {id:.60}", code=f"{what}_not_found")
    return found


def _copy(source: IO[bytes], path: Path, lasting: bool) -> None:
    with path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        if lasting:
            os.fsync(target.fileno())
