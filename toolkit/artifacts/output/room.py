"""Whether the disk has room for what a stage will write, asked before the work begins."""

from __future__ import annotations

import shutil
from pathlib import Path

from toolkit.artifacts.output.partial import partial_dir
from toolkit.configs.option import show_size
from toolkit.errors import ToolkitError


def check_room(target: Path | str, needed: int) -> None:
    """Raise ToolkitError where the disk of ``target`` has fewer than ``needed`` bytes free, those counted that an
    earlier run has left for it. A disk that does not tell has room."""
    target = Path(target).resolve()
    partial = partial_dir(target)
    there = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()) if partial.is_dir() else 0
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
