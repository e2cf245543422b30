"""Files of figures that commands write where their options say (``--json``, ``--csv``, ``--plot``, ``/save``).

An earlier result of the same kind is replaced, whole or not at all; a table grows by a row. Any other file stays: the
checks are asked before long work. A device or pipe (``/dev/stdout``) is written to as it is.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.artifacts.json_file import read_json
from toolkit.artifacts.manifest import MANIFEST
from toolkit.artifacts.output.replace import foreign
from toolkit.artifacts.output.stage import write_file
from toolkit.base.extras import require
from toolkit.errors import ToolkitError, UsageError

_OPEN_FILE = re.compile(r"/dev/(stdout|stderr|fd/\d+)|/proc/[^/]+/(task/\d+/)?fd/\d+")
_PLOT_MARK = {"Software": f"toolkit {__version__}"}


def check_json(option: str, file: Path | str | None, keys: Sequence[str]) -> None:
    """Raise UsageError unless JSON can be written to ``file`` (None and "-" are fine) without loss: it is new or empty,
    or holds an object, or a list of objects, with ``keys``."""

    def earlier(path: Path) -> bool:
        try:
            found = read_json(path)
        except ToolkitError:
            return False
        first = found[0] if isinstance(found, list) and found else found
        return isinstance(first, dict) and set(keys) <= first.keys()

    if file not in (None, "-"):
        _check(option, Path(str(file)), earlier, "an earlier result of this command")


def check_csv(option: str, file: Path | None, columns: Sequence[str]) -> None:
    """Raise UsageError unless rows of ``columns`` can be appended to ``file`` (None is fine)."""

    def earlier(path: Path) -> bool:
        with path.open(newline="", encoding="utf-8", errors="replace") as handle:
            return next(csv.reader([handle.readline(1 << 16)]), []) == list(columns)

    if file is not None:
        _check(option, file, earlier, f"a table with the columns {', '.join(columns[:3])} …")


def check_plot(option: str, file: Path | str | None) -> None:
    """Raise UsageError unless a picture can be drawn, into ``file`` (None is fine) without loss."""
    if file is None:
        return
    require("matplotlib", option)
    if Path(file).suffix.lower() != ".png":
        raise UsageError(f"{option} {file}: expected a name that ends in .png")

    def earlier(path: Path) -> bool:
        with path.open("rb") as handle:
            return handle.read(8) == b"\x89PNG\r\n\x1a\n" and b"Software\0toolkit " in handle.read(4096)

    _check(option, Path(file), earlier, "a picture that this tool drew")


def append_csv(option: str, file: Path, *rows: Mapping[str, Any]) -> None:
    """Append ``rows``, one or more, to a table, whose first line is made of their keys. Raises UsageError."""
    try:
        end = _last_byte(file)
        with file.open("a", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, list(rows[0]))
            if not end:
                writer.writeheader()
            elif end != b"\n":  # an editor has left the last line open
                handle.write(writer.writer.dialect.lineterminator)
            writer.writerows(rows)
    except OSError as error:
        raise UsageError(f"{option} {file}: cannot be written ({error.strerror or error})") from error


def _last_byte(file: Path) -> bytes:
    """Of a file; none of one that is empty or new, or of a device or pipe."""
    if _is_special(file) or not file.exists() or not file.stat().st_size:
        return b""
    with file.open("rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read()


def write_text(option: str, file: Path, text: str) -> None:
    """Write ``file``, whole or not at all. Raises UsageError, ToolkitError where the disk is full."""
    with _refusals_told(option, file):
        if _is_special(file):
            file.write_text(text, encoding="utf-8")
            return
        with write_file(file) as scratch:
            scratch.write_text(text, encoding="utf-8")


def save_plot(option: str, figure: Any, file: Path, dpi: int) -> None:
    """Draw a matplotlib figure into ``file``, a PNG. Raises UsageError or ToolkitError as ``write_text`` does."""
    with _refusals_told(option, file), write_file(file) as scratch:
        figure.savefig(scratch, format="png", dpi=dpi, metadata=_PLOT_MARK)


@contextmanager
def _refusals_told(option: str, file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise UsageError(f"{option} {file}: cannot be written ({told})") from error


def _is_special(path: Path) -> bool:
    """Whether ``path`` is a device, a pipe or the like, or an open file by way of /dev/stdout, /dev/fd/3."""
    return _OPEN_FILE.fullmatch(str(path)) is not None or (path.exists() and not path.is_file())


def _check(option: str, path: Path, earlier: Callable[[Path], bool], expected: str) -> None:
    try:
        folder = path.absolute().parent
        if path.is_dir() or not folder.is_dir():
            raise UsageError(f"{option} {path}: expected a file in a directory that exists")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise UsageError(f"{option} {path}: cannot be written (permission denied)")
        if _is_special(path) or not os.path.lexists(path):
            return
        if path.is_symlink():
            raise UsageError(f"{option} {path}: is a symbolic link, which is never replaced; choose another name")
        if (folder / MANIFEST).is_file() and path.name not in foreign(folder):
            raise UsageError(f"{option} {path}: is a file of the artifact {folder}; choose another name")
        if path.stat().st_size and not earlier(path):
            raise UsageError(
                f"{option} {path}: never replaced, for it is not {expected}; choose another name, or move it away"
            )
    except (OSError, ValueError) as error:  # a name that is too long, or holds a null byte
        raise UsageError(f"{option} {str(path)[:100]}: cannot be written ({error})") from error
