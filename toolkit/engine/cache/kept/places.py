"""Which folders blocks are kept in, remembered for `tool cache`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from toolkit.base.whole_file import write_whole

NAME = "kv_cache_dirs.json"
MOST = 64


def known(home: Path) -> list[Path]:
    """The folders that engines of this user were told, those that are there; the last one first."""
    try:
        found = json.loads((home / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    paths = [Path(path) for path in found if isinstance(path, str)] if isinstance(found, list) else []
    return [path for path in paths if path.is_absolute() and path.is_dir()]


def remember(home: Path, path: Path) -> None:
    """Add a folder; where that cannot be written, it is left out."""
    before = known(home)
    if before[:1] == [path]:
        return
    paths = [path, *(p for p in before if p != path)][:MOST]
    with suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
        write_whole(home / NAME, (json.dumps([str(p) for p in paths], indent=2) + "\n").encode())
