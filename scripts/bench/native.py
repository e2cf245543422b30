"""Whether figures of this machine's CPU would be the native runner's."""

from __future__ import annotations

from toolkit.runners.choose import gpu_is_likely
from toolkit.runners.native import library


def need_native() -> None:
    """Leave with 1, and a line on what to do, where models would run on the tensor runner because the native library is
    missing, stale or for another processor. Where a GPU runs them, nothing is needed of it."""
    if not gpu_is_likely() and (why := library.available()):
        raise SystemExit(f"{why}. Without it models run on the tensor runner, whose figures are other ones")
