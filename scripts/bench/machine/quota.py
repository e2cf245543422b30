"""A model in a container's share of the processors: how fast with the threads that follow from it, and with one a core.

    sudo python scripts/bench/machine/quota.py --model work/demo-engine

For each share a control group is made (version 1 or 2, whichever the machine has mounted; it takes root) or, for a
cpuset, an affinity mask as containers get one. Both runs are in the same group, one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.native import need_native

from toolkit.commands.output import stderr, stdout, table

CGROUPS = Path("/sys/fs/cgroup")
PERIOD = 100_000  # µs
LOAD = "--concurrency 4 --prompt-tokens 128 --completion-tokens 48 --json -"


@contextlib.contextmanager
def group(processors: float) -> Iterator[Path]:
    """A control group with a quota of so many; its file of processes."""
    old = (CGROUPS / "cpu" / "cpu.cfs_quota_us").exists()
    folder = (CGROUPS / "cpu" if old else CGROUPS) / f"toolkit-quota-{os.getpid()}"
    folder.mkdir()
    try:
        if old:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(round(processors * PERIOD)))
        else:
            (folder / "cpu.max").write_text(f"{round(processors * PERIOD)} {PERIOD}")
        yield folder / "cgroup.procs"
    finally:
        for _ in range(100):  # its processes end a moment after they are waited for
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


def measure(model: str, procs: Path | None, cpus: set[int], threads: int | None) -> dict[str, float]:
    """The figures of one run."""

    def enter() -> None:
        if procs is not None:
            procs.write_text(str(os.getpid()))
        os.sched_setaffinity(0, cpus)

    argv = ["tool", "profile", "generation", model, *LOAD.split()]
    if threads is not None:
        argv += ["--threads", str(threads)]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(argv, preexec_fn=enter, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    need_native()
    cpus, rows = os.sched_getaffinity(0), []
    shares: list[tuple[str, float | None, set[int]]] = [
        ("all", None, cpus),
        ("cpu.max 1", 1.0, cpus),
        ("cpu.max 0.5", 0.5, cpus),
        ("a cpuset of 1", None, {min(cpus)}),
    ]
    for name, quota, allowed in shares:
        speeds: dict[int | None, list[float]] = {None: [], len(cpus): []}
        with contextlib.nullcontext() if quota is None else group(quota) as procs:
            for _ in range(args.rounds):
                for threads, found in speeds.items():
                    found.append(measure(args.model, procs, allowed, threads)["decode_throughput"])
        own, each = (statistics.median(found) for found in speeds.values())
        stderr().print(f"{name}: {own:.0f} tokens/s, {each:.0f} with a thread a core")
        rows.append((name, f"{own:.0f}", f"{each:.0f}", f"{own / each:.2f}"))
    title = f"{args.model}, 4 requests at once, tokens/s written"
    stdout().print(table(title, ["share", "threads as it chooses", f"--threads {len(cpus)}", "ratio"], rows))


if __name__ == "__main__":
    main()
