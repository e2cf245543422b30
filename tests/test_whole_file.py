"""Files that are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.base.whole_file import write_whole


def test_it_is_on_disk_before_it_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen, replace = tmp_path / "a.json", list[Any](), os.replace
    write_whole(file, b"old", 0o600)
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(Path(os.readlink(f"/proc/self/fd/{fd}"))))
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append((a.read_bytes(), b.read_bytes())), replace(a, b)))
    write_whole(file, b"new", 0o600)
    assert seen[1:] == [(b"new", b"old"), tmp_path] and seen[0].parent == tmp_path
    assert file.read_bytes() == b"new" and file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_one_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "a.json"
    write_whole(file, b"old")

    def fails(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, fails)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
