"""How long a sum over two ranks takes on links of 1, 10 and 100 Gbit/s beside what docs/distributed.md predicts:
python scripts/bench/machine/links.py

Two network namespaces stand for machines (veth and tbf; needs root, ip and tc).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

ADDRESSES = ("10.97.6.1", "10.97.6.2")
# bits a second, and bytes that pass at once: the fewest that a timer can keep up with, for a link lets none pass so
RATES = {"no limit": None, "1 Gbit/s": (1e9, 3200), "10 Gbit/s": (1e10, 70_000), "100 Gbit/s": (1e11, 1 << 20)}
SIZES = (8 << 10, 64 << 10, 1 << 20, 8 << 20)  # bytes: of a token's row of 2048 floats, of 8, of 128, of 1024
PORT = 29533


def rank_main(rank: int) -> None:
    """Sums of all sizes; the first rank prints seconds of each, the median."""
    import torch
    import torch.distributed as dist

    from toolkit.parallel.group import Group
    from toolkit.parallel.layout import Layout
    from toolkit.parallel.part import Part

    layout = Layout(tp=2)
    group = Group(rank, layout, Part(None, {}, (0, 0), (1, 1), {}), 1)  # type: ignore[arg-type]  # nothing is computed
    if rank == 0:
        store = dist.TCPStore(ADDRESSES[0], PORT, is_master=True, wait_for_workers=False)
        group.meet(store, ADDRESSES[0], 60)
    else:
        group.join_at(ADDRESSES[0], PORT, ADDRESSES[1], 60)
    for size in SIZES:
        x, taken = torch.zeros(size // 4), []
        for _ in range(25 if size < 1 << 20 else 9):
            begun = time.perf_counter()
            group.sum(x)
            taken.append(time.perf_counter() - begun)
        if rank == 0:
            print(sorted(taken[2:])[len(taken[2:]) // 2], flush=True)


def main() -> None:
    names = [f"links-{os.getpid()}-{i}" for i in (1, 2)]
    ends = [f"ln{os.getpid() % 100000}{side}" for side in "ab"]

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            run("ip", "link", "set", end, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            for one in (end, "lo"):
                run("ip", "-n", name, "link", "set", one, "up")
        free: list[float] = []
        for told, link in RATES.items():
            for name, end in zip(names, ends, strict=True):
                if link is not None:
                    limit = ("rate", f"{link[0]:.0f}bit", "burst", str(link[1]), "latency", "200ms")
                    run("tc", "-n", name, "qdisc", "replace", "dev", end, "root", "tbf", *limit)
            command = [sys.executable, __file__]
            ranks = [
                subprocess.Popen(["ip", "netns", "exec", name, *command, str(i)], stdout=subprocess.PIPE, text=True)
                for i, name in enumerate(names)
            ]
            said = [rank.communicate(timeout=120)[0] for rank in ranks]
            found = [float(line) for line in said[0].split()]
            free = free or found
            for size, seconds, bare in zip(SIZES, found, free, strict=True):
                wire = 0.0 if link is None else 8 * size / link[0]  # 2 (N - 1) / N of it, of two ranks
                told_before = max(bare, free[0] + wire)  # a message takes no less than without a limit
                off = f" ({100 * (seconds / told_before - 1):+.0f} %)"
                predicted = "" if link is None else f"{1e3 * told_before:10.3f} ms predicted{off}"
                print(f"{told:>11} {size >> 10:6} KiB {1e3 * seconds:10.3f} ms {predicted}", flush=True)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rank", nargs="?", type=int, help="used by the script itself: run as this rank")
    rank = parser.parse_args().rank
    main() if rank is None else rank_main(rank)
