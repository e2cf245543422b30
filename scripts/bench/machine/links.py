"""How long a sum over two ranks takes on links of 1, 10 and 100 Gbit/s beside what docs/distributed.md predicts:
python scripts/bench/machine/links.py

Two network namespaces stand for machines (veth and htb; needs root, ip and tc). Acknowledgements (short packets) go
first: behind data, as a plain throttle keeps them, they let a connection that sends both ways have half of the link. A
throttle lets through at once what it has saved while nothing was sent, and no more than the processors carry: each
link's rate is measured by a stream both ways, with the smallest burst that gets near it.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ADDRESSES = ("10.97.6.1", "10.97.6.2")
# bits a second; "no limit" has a throttle, too, whose work takes time, but it lets all pass
RATES = {"no limit": 1e12, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
BURSTS = (8000, 16_000, 64_000, 256_000, 1 << 20)  # bytes that pass at once
NEAR = 0.93  # of its rate a stream must get, headers left out, else the next burst is tried
SEGMENT = 64 << 10  # bytes that the system hands to the link as one packet, which passes whole
SIZES = (8 << 10, 64 << 10, 1 << 20, 8 << 20)  # bytes: of a token's row of 2048 floats, of 8, of 128, of 1024
PORT, TURNS, ROUND_SECONDS = 29533, 40, 0.05
WARM = 100  # small sums before those that count: behind long ones, cores take longer to wake up
STREAM_SECONDS, SKIPPED = 0.5, 4 << 20  # bytes at its begin, by which the throttle has nothing saved


def stream_main(rank: int) -> None:
    """Send for a while, and print the bits a second that come meanwhile from the other."""
    if rank == 0:
        with socket.create_server((ADDRESSES[0], PORT)) as server:
            print(flush=True)  # the other may begin
            sock = server.accept()[0]
    else:
        sock = socket.create_connection((ADDRESSES[0], PORT))

    def send() -> None:
        until, data = time.perf_counter() + STREAM_SECONDS, bytes(1 << 18)
        while time.perf_counter() < until:
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    come, begun, buffer = 0, 0.0, bytearray(1 << 20)
    while size := sock.recv_into(buffer):
        come += size
        if not begun and come > SKIPPED:
            begun, come = time.perf_counter(), 0
    print(8 * come / (time.perf_counter() - begun), flush=True)
    sender.join()


def sums_main(rank: int) -> None:
    """Sums of all sizes, ``TURNS`` times for each link: the first rank begins when it is told to, and prints seconds of
    each size. Both stay for all turns, so that every link meets the same connection."""
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

    def taken(x: torch.Tensor, count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            group.sum(x)
        return (time.perf_counter() - begun) / count

    for _ in range(TURNS * len(RATES)):
        if rank == 0:
            input()
        found = []
        taken(torch.zeros(SIZES[0] // 4), WARM)
        for size in SIZES:
            x = torch.zeros(size // 4)
            count = torch.tensor([ROUND_SECONDS / taken(x, 3)])
            group.sum(count)  # both ranks take the same
            found.append(taken(x, max(3, int(count) // 2)))
        if rank == 0:
            print(*found, flush=True)


def predicted(size: int, bare: float, piece: float, bits: float, burst: int) -> float:
    """Seconds of a sum of ``size`` bytes over two ranks, which send as many each, on a link of ``bits`` a second that
    lets ``burst`` bytes pass at once: ``bare`` is what it takes without a limit, ``piece`` what one of ``SEGMENT``
    bytes at most does. Ranks copy and add while later pieces are on their way: one piece comes on top."""
    return max(bare, piece + 8 * max(0, size - burst) / bits)


@contextmanager
def machines() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, and the end of the link in each."""
    names = [f"links-{os.getpid()}-{i}" for i in (1, 2)]
    ends = [f"ln{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            run("ip", "link", "set", end, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            for one in (end, "lo"):
                run("ip", "-n", name, "link", "set", one, "up")
        yield list(zip(names, ends, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def ranks(link: list[tuple[str, str]], what: str) -> list[subprocess.Popen[str]]:
    """A process in each namespace; the first has printed nothing yet."""
    found: list[subprocess.Popen[str]] = []
    for i, (name, _) in enumerate(link):
        command = ["ip", "netns", "exec", name, sys.executable, __file__, what, str(i)]
        found.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        if what == "stream" and i == 0:
            said(found[0])
    return found


def said(rank: subprocess.Popen[str]) -> list[float]:
    """The numbers of the line that a rank prints next."""
    assert rank.stdout is not None
    return [float(word) for word in rank.stdout.readline().split()]


def stream(link: list[tuple[str, str]]) -> float:
    """Bits a second that each way gets, the slower one."""
    return min(said(rank)[0] for rank in ranks(link, "stream"))


def unlimited(link: list[tuple[str, str]]) -> None:
    for name, end in link:
        command = ["tc", "-n", name, "qdisc", "del", "dev", end, "root"]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)  # there may be none


def throttle(link: list[tuple[str, str]], rate: float, burst: int) -> None:
    unlimited(link)
    for name, end in link:
        tc = ("tc", "-n", name)
        run(*tc, "qdisc", "add", "dev", end, "root", "handle", "1:", "htb", "default", "10")
        for parent, number, prio, share in (("1:", 1, 0, 1.0), ("1:1", 10, 1, 0.9), ("1:1", 20, 0, 0.1)):
            run(*tc, "class", "add", "dev", end, "parent", parent, "classid", f"1:{number}", "htb", "prio", str(prio),
                "rate", f"{share * rate:.0f}bit", "ceil", f"{rate:.0f}bit", "burst", str(burst), "cburst", str(burst),
                "quantum", str(SEGMENT))  # fmt: skip
        short = ("u32", "match", "u16", "0x0000", "0xff00", "at", "2")  # of less than 256 bytes
        run(*tc, "filter", "add", "dev", end, "parent", "1:", "protocol", "ip", "prio", "1", *short, "flowid", "1:20")


def middle(taken: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter: now and then the machine is somewhere else."""
    kept = sorted(taken)[len(taken) // 4 : len(taken) - len(taken) // 4]
    return sum(kept) / len(kept)


def throttled(link: list[tuple[str, str]], rate: float) -> tuple[float, int]:
    """(bits a second that a stream gets, the burst): of the smallest burst that comes near, else of the largest, whose
    timer costs the processors least."""
    for burst in BURSTS:
        throttle(link, rate, burst)
        if (got := stream(link)) > NEAR * rate:
            break
    return got, burst


def main() -> None:
    with machines() as link:
        limits = {told: throttled(link, rate) for told, rate in RATES.items()}
        found: dict[str, list[list[float]]] = {told: [] for told in RATES}
        first, second = ranks(link, "sums")
        assert first.stdin is not None
        for _ in range(TURNS):  # a virtual core wakes up sooner or later from minute to minute
            for told, rate in random.sample(list(RATES.items()), len(RATES)):
                throttle(link, rate, limits[told][1])
                print(file=first.stdin, flush=True)
                found[told].append(said(first))
        second.wait(timeout=60)
    means = {told: [middle(x) for x in zip(*turns, strict=True)] for told, turns in found.items()}
    bare = means["no limit"]
    for told, (bits, burst) in limits.items():
        print(f"{told}: a stream gets {bits / 1e9:.2f} Gbit/s each way, burst {burst} bytes")
        for size, seconds, without in zip(SIZES, means[told], bare, strict=True):
            line = f"{told:>11} {size >> 10:6} KiB {1e3 * seconds:10.3f} ms"
            if told != "no limit":
                piece = bare[SIZES.index(min(size, SEGMENT))]
                before = predicted(size, without, piece, bits, burst)
                line += f" {1e3 * before:10.3f} ms predicted ({100 * (seconds / before - 1):+.0f} %)"
            print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["stream", "sums"], help="used by the script itself")
    parser.add_argument("rank", nargs="?", type=int, help="used by the script itself: run as this rank")
    given = parser.parse_args()
    {None: lambda _: main(), "stream": stream_main, "sums": sums_main}[given.what](given.rank)
