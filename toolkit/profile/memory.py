"""Peak memory of a run: of the GPUs where the model is on one, else of this process and its children."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable

import psutil

MIB = 1 << 20
GPUS, OWN = "all GPUs", "own processes"  # whose memory a peak is


class ProcessTree:
    """Resident memory of this process and all its children in MiB; mapped files count in each process that has them.

    Which these are is looked up at most once a second: going through all processes of the machine would cost the run
    that is measured a sixtieth of a core.
    """

    def __init__(self) -> None:
        self._processes: list[psutil.Process] = []
        self._looked = float("-inf")

    def __call__(self) -> float:
        if time.monotonic() - self._looked > 1:
            me = psutil.Process(os.getpid())
            self._processes, self._looked = [me, *me.children(recursive=True)], time.monotonic()
        total = 0
        for process in self._processes:
            try:
                total += process.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
        return total / MIB


def gpu_used_mib() -> float:
    """Memory in use on all GPUs, whoever uses it: nothing else may run on them while measuring."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    return float(sum(map(float, lines)))


class PeakMemory:
    """Samples ``read`` in a thread; ``peak()`` is the highest value since the last call of it. ``whose``: memory."""

    def __init__(self, read: Callable[[], float], whose: str = OWN, interval_s: float = 0.1) -> None:
        self.whose = whose
        self._read = read
        self._interval = interval_s
        self._peak = read()
        self._reading = threading.Lock()  # else a peak told meanwhile would come back as the next one's
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @classmethod
    def of(cls, device: str) -> PeakMemory:
        """Of a model that is on ``device``."""
        return cls(gpu_used_mib, GPUS) if device.startswith("cuda") else cls(ProcessTree())

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            with self._reading:
                self._peak = max(self._peak, self._read())

    def peak(self) -> float:
        with self._reading:
            found = max(self._peak, self._read())
            self._peak = 0.0
        return found
