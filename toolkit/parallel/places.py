"""On which cores ranks run: each on those of a NUMA node where there are several, or on those that the user says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import UsageError
from toolkit.models.spec import portion

VARIABLE = "TOOLKIT_RANK_CORES"  # lists as taskset has them, a rank each, with semicolons between: 0-7;8-15
NODES = Path("/sys/devices/system/node")
MOST_CORES = 1 << 16


def cores_of(world: int, nodes: Path = NODES) -> list[list[int]] | None:
    """Of each rank, or None where they share all cores. Raises UsageError for cores that the process has not."""
    allowed = os.sched_getaffinity(0)
    if told := os.environ.get(VARIABLE, "").strip():
        found = [_listed(part, told) for part in told.split(";")]
        if len(found) != world:
            raise UsageError(f"{VARIABLE}: expected {world} lists of cores, a rank each, found {len(found)}: {told}")
        if missing := sorted(set().union(*found) - allowed):
            raise UsageError(f"{VARIABLE}: core {missing[0]} is none of those that this process may use")
        return found
    by_node = [[core for core in _node(file) if core in allowed] for file in sorted(nodes.glob("node[0-9]*/cpulist"))]
    by_node = [cores for cores in by_node if cores]
    if len(by_node) < 2:
        return None
    if world >= len(by_node):
        return [
            _part(by_node[(node := rank * len(by_node) // world)], rank, node, world, len(by_node))
            for rank in range(world)
        ]
    spans = (portion(len(by_node), rank, world) for rank in range(world))
    return [[core for cores in by_node[start:stop] for core in cores] for start, stop in spans]


def _part(cores: list[int], rank: int, node: int, world: int, nodes: int) -> list[int]:
    """Of a node's cores those of one of the ranks that it has."""
    ranks = [r for r in range(world) if r * nodes // world == node]
    start, stop = portion(len(cores), ranks.index(rank), len(ranks))
    return cores[start:stop] or cores


def _node(file: Path) -> list[int]:
    text = file.read_text().strip()  # a node of memory alone has none
    return _listed(text, str(file)) if text else []


def _listed(text: str, told: str) -> list[int]:
    """``0-3,8`` as numbers."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers = all(x.strip().isdecimal() for x in (first, last or first))
        if not numbers or not int(first) <= int(last or first) < MOST_CORES:
            raise UsageError(f"{VARIABLE}: expected lists of cores such as 0-7;8-15, found {told!r}")
        found.extend(range(int(first), int(last or first) + 1))
    return found


@contextmanager
def on_cores(cores: list[int] | None) -> Iterator[None]:
    """This thread on these cores for as long as this lasts; threads that it starts stay there."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
