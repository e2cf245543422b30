"""Freed memory is kept while a layer is worked on, and given back when asked."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

CODE = """
import resource, sys
import psutil, torch

from toolkit.quant.heap import give_back, keep_freed
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
if sys.argv[1] == "keep":
    keep_freed()
x = torch.ones(2048, 1024)
for _ in range(3):
    before = faults()
    for _ in range(10):
        inner = [x.repeat(1, n) for n in (3, 3, 1)]
        x = torch.cat([(inner[0] * inner[1])[:, :512], inner[2][:, :512]], 1)
        del inner
print(faults() - before)
held = psutil.Process().memory_info().rss
give_back()
print((held - psutil.Process().memory_info().rss) >> 20)
"""


@pytest.mark.skipif(not psutil.LINUX, reason="of glibc's heap")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    def run(how: str) -> tuple[int, int]:
        done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        faults, given = map(int, done.stdout.split())
        return faults, given

    (kept, given), (plain, _) = run("keep"), run("leave")
    assert kept < plain / 4, "the pages stay"
    assert given > 100, "MiB: until they are given back"
