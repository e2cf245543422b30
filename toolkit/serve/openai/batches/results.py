"""The file of a batch's answers: a line an answer, each written whole, and read again by who goes on after a crash.

An answer's ``id`` holds its line's number and a digest of the line, so that the file alone says what is done, and of
what.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.http.replies import as_json
from toolkit.serve.openai.batches.lines import split

_START = b'{"id":"batch_req_'
_LINE = re.compile(
    rb'\{"id":"batch_req_(\d{1,15})_([0-9a-f]{16})","custom_id":(?:null|"(?:[^"\\]|\\.)*"),'
    rb'"response":(?:null|\{"status_code":(\d{3}))'
)
_NUMBER = re.compile(re.escape(_START) + rb"(\d+)_")
_HEAD = 1 << 14  # bytes in which an answer says all this: a custom_id is short


@dataclass(frozen=True)
class Done:
    """A line that is answered; ``good``: with status 200."""

    number: int
    digest: str
    good: bool


def places(answers: Path) -> list[int]:
    """Where each line of a file of answers begins, in the order of the input's lines."""
    found, at = [], 0
    with answers.open("rb") as file:
        for line in file:
            number = _NUMBER.match(line)
            found.append((int(number[1]) if number else 0, at))
            at += len(line)
    return [at for _, at in sorted(found)]


def lines_at(answers: Path, places: Iterable[int]) -> Iterator[bytes]:
    """The lines that begin there."""
    with answers.open("rb") as file:
        for at in places:
            file.seek(at)
            yield file.readline()


def answered(number: int, digest: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """OpenAI's line of an answer; ``body``: the JSON that the server gave."""
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, as_json(request_id), body)
    return _line(number, digest, custom_id, response, b"null")


def failed(number: int, digest: str, custom_id: str | None, code: str, message: str) -> bytes:
    """OpenAI's line of a request that was never made."""
    error = as_json({"code": code, "message": f"line {number}: {message}"})
    return _line(number, digest, custom_id, b"null", error)


def _line(number: int, digest: str, custom_id: str | None, response: bytes, error: bytes) -> bytes:
    """As ``_LINE`` finds it again."""
    head = b'%b%d_%b","custom_id":%b' % (_START, number, digest.encode(), as_json(custom_id))
    return b'%b,"response":%b,"error":%b}\n' % (head, response, error)


class Results:
    """Grows by whole lines. Of a file that another run left, a torn last line is cut off.

    Raises UsageError for a file of something else, ToolkitError for one that another run is writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror}); name another file") from error
        try:
            self._take()
        except BaseException:
            os.close(self._file)
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ToolkitError(
                f"{self._path}: another run is writing it; wait for that, or name another file"
            ) from error
        end = 0
        with self._path.open("rb") as file:
            for number, (head, length, whole) in enumerate(split(file, _HEAD), 1):
                if whole and _LINE.match(head):
                    end += length + 1
                elif whole or not (head.startswith(_START) or _START.startswith(head)):
                    expected = "answers of a batch; name another file, or remove this one"
                    raise UsageError(f"{self._path}: expected {expected}, found another text in line {number}")
        os.ftruncate(self._file, end)

    def done(self) -> Iterator[Done]:
        """What earlier runs have answered."""
        with self._path.open("rb") as file:
            for head, _, _ in split(file, _HEAD):
                found = _LINE.match(head)
                assert found is not None, "looked at when it was opened"
                yield Done(int(found[1]), found[2].decode(), found[3] == b"200")

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._file).st_size

    def clear(self) -> None:
        """Throw all answers away."""
        os.ftruncate(self._file, 0)

    def write(self, line: bytes) -> None:
        """Append one. Raises OSError, and the file is as it was; where that fails too, what is torn is cut off at the
        next start."""
        end = self.size
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, end)
            raise

    def close(self) -> None:
        """Raises OSError where the disk has not taken what was written."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)
