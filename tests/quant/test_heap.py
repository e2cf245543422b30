"""Freed memory is kept where layers are small, and given back when asked, but for what is little."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

CODE = """
import ctypes, sys
import psutil
from toolkit.quant.layers.heap import give_back, keep_freed

libc, size = ctypes.CDLL(None), 20 << 20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
taken = lambda: psutil.Process().memory_info().rss >> 20
if sys.argv[1] != "leave":
    keep_freed(small=sys.argv[1] == "small layers")
before = taken()
for count in (16, 8):
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        libc.memset(block, 1, size)
    full, last = taken() - before, libc.malloc(size)  # glibc gives back on its own what lies at the end
    for block in blocks:
        libc.free(block)
    kept = taken() - before
    give_back()
    print(full, kept, taken() - before)
    libc.free(last)
"""


@pytest.mark.skipif(not psutil.LINUX, reason="of glibc's heap")
@pytest.mark.parametrize("keep", ["small layers", "large layers", "leave"])
def test_freed_memory_is_kept_until_it_is_given_back(keep: str) -> None:
    command = [sys.executable, "-c", CODE, keep]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (full, kept, left), (_, _, few) = (map(int, line.split()) for line in done.stdout.splitlines())  # MiB
    assert full >= 315 and left <= 10
    if keep == "small layers":
        assert kept >= 315 and few >= 155, "what it has grown by less than 256 MiB stays"
    else:
        assert kept <= 10, "by itself, glibc hands such blocks back at once"
