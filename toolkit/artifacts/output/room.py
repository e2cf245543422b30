"""Whether the disk has room for what a stage will write, asked before the work begins."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from toolkit.artifacts.output.partial import partial_dir
from toolkit.configs.option import show_size
from toolkit.errors import ToolkitError


def check_room(target: Path | str, needed: int, overwrite: bool = True) -> None:
    """Raise ToolkitError where the disk of ``target`` has fewer than ``needed`` bytes free, those counted that an
    earlier run has left for it. A disk that does not tell has room, and so has one where without ``overwrite`` nothing
    will be written: what ``target`` holds is the result already, or in the way."""
    target = Path(target).resolve()
    if not overwrite and target.is_dir() and any(target.iterdir()):
        return
    there = _bytes(partial_dir(target))
    disk = next((folder for folder in target.parents if folder.is_dir()), target.parent)
    try:
        free = shutil.disk_usage(disk).free
    except OSError:
        return
    if free + there < needed:
        raise ToolkitError(
            f"{target}: about {show_size(needed)} are needed there for the result and the work on it, "
            f"{show_size(free + there)} are free; free some space, or write to another disk"
        )


def _bytes(folder: Path) -> int:
    """Of all files in it, from which another run may take some away meanwhile."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += os.lstat(os.path.join(place, name)).st_size
    return found
