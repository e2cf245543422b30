"""Whether figures of this machine's CPU would be the native runner's."""

from __future__ import annotations

from toolkit.runners.choose import gpu_is_likely
from toolkit.runners.native import build, library


def need_native() -> None:
    """Leave with 1, and a line on what to do, where models would run on the tensor runner because the native library is
    missing, stale or for another processor, or on a library from before a change of its sources. Where a GPU runs them,
    nothing is needed of it."""
    if gpu_is_likely():
        return
    if why := library.available():
        raise SystemExit(f"{why}. Without it models run on the tensor runner, whose figures are other ones")
    path = library.library_path()
    if path == build.HERE / build.LIBRARY and (source := build.newer_source(path)):
        raise SystemExit(f"{path}: {source.name} has changed since it was built; build it again with {library.BUILD}")
