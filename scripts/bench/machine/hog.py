"""A busy neighbour on the same cores: one process that reads memory as fast as it can, or one that multiplies.

python scripts/bench/machine/hog.py memory        until it is stopped
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

KINDS = ("memory", "compute")
READ = 512 << 20  # bytes: beyond every cache


@contextlib.contextmanager
def beside(kind: str | None) -> Iterator[None]:
    """While the block runs, a neighbour of that kind does; none for None."""
    if kind is None:
        yield
        return
    # One thread: a machine shared with one other job, whatever its number of cores.
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, __file__, kind], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the neighbour did not start: exit {process.wait()}")
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    kind = parser.parse_args().kind
    import numpy as np

    numbers = np.ones(READ // 4 if kind == "memory" else 128 * 128, np.float32)
    square = numbers[: 128 * 128].reshape(128, 128)
    print("busy", flush=True)
    while True:
        numbers.max() if kind == "memory" else square @ square


if __name__ == "__main__":
    main()
