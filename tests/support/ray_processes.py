"""``named(process, name)``: ids of the workers of Ray below ``process`` that show themselves as ``ray::NAME``."""

from __future__ import annotations

import psutil


def named(process: int, name: str) -> list[int]:
    found = []
    for one in psutil.Process(process).children(recursive=True):
        try:
            if " ".join(one.cmdline()).startswith(f"ray::{name}"):
                found.append(one.pid)
        except psutil.Error:
            continue
    return found
