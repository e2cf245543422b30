"""Freed memory is kept while a layer is worked on, and given back when asked."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

CODE = """
import ctypes, sys
import psutil
from toolkit.quant.heap import give_back, keep_freed

libc, size = ctypes.CDLL(None), 20 << 20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
taken = lambda: psutil.Process().memory_info().rss >> 20
if sys.argv[1] == "keep":
    keep_freed()
before = taken()
blocks = [libc.malloc(size) for _ in range(8)]
for block in blocks:
    libc.memset(block, 1, size)
full = taken() - before
for block in blocks:
    libc.free(block)
kept = taken() - before
give_back()
print(full, kept, taken() - before)
"""


@pytest.mark.skipif(not psutil.LINUX, reason="of glibc's heap")
@pytest.mark.parametrize("keep", [True, False])
def test_freed_memory_is_kept_until_it_is_given_back(keep: bool) -> None:
    command = [sys.executable, "-c", CODE, "keep" if keep else "leave"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    full, kept, left = map(int, done.stdout.split())  # MiB
    assert full >= 155 and left <= 10
    assert kept >= 155 if keep else kept <= 10, "without it, glibc hands such blocks back at once"
