"""PTX executed on a CPU by numpy, a warp's lanes at once: threads, their memory, and what a GPU would refuse.

It is strict where hardware leaves room: shared memory starts as NaN, asynchronous copies arrive at the latest moment
that is allowed, a warp runs until it waits for the others, in an order that the caller chooses. Addresses outside of
tensors or not aligned, tensor cores that lack lanes, and barriers that not all lanes reach are faults.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

LANES = 32
BASE = 1 << 16  # no tensor lies below
SPECIAL = ("%tid.x", "%laneid", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")


class Fault(AssertionError):
    """Something that a GPU refuses, or that nobody can rely on."""


@dataclass
class Space:
    """Memory by address. ``regions``: (start, stop) of what may be touched; ``late``: of what the kernel before still
    writes.
    """

    name: str
    base: int
    whole: np.ndarray
    regions: list[tuple[int, int]]
    late: list[tuple[int, int]] = field(default_factory=list)

    def places(self, at: np.ndarray, size: int, waited: bool = True) -> np.ndarray:
        """Where ``size`` bytes at each address lie, in bytes; checked."""
        at = at.astype(np.int64)
        if (at % size).any():
            raise Fault(f"{self.name} memory: {size} bytes at an address that is not aligned")
        inside = np.zeros(at.shape, np.bool_)
        for start, stop in self.regions:
            inside |= (at >= start) & (at + size <= stop)
        if not inside.all():
            raise Fault(f"{self.name} memory: {size} bytes at {hex(int(at[~inside][0]))}, where no tensor is")
        if not waited and any(((at < stop) & (at + size > start)).any() for start, stop in self.late):
            raise Fault("memory of the kernel before is touched before it has ended")
        return at - self.base

    def words(self, size: int) -> np.ndarray:
        """All of it as words of ``size`` bytes."""
        return self.whole.view(f"u{size}")


def world(regions: list[tuple[int, int]], late: list[tuple[int, int]]) -> Space:
    """This process's memory."""
    size = (1 << 47) - BASE
    return Space("global", BASE, np.frombuffer((ctypes.c_uint8 * size).from_address(BASE), np.uint8), regions, late)


@dataclass
class Warp:
    """``pc`` [32]: where each lane is; ``mask``: those that run, None for all; ``copies``: (lanes, to, from, bytes,
    group of each) under way.
    """

    tid: np.ndarray
    pc: np.ndarray
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    mask: np.ndarray | None = None
    groups: np.ndarray = field(default_factory=lambda: np.zeros(LANES, np.int64))
    copies: list[tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray]] = field(default_factory=list)
    waited: bool = False
    place: dict[str, np.ndarray] = field(default_factory=dict)
    memory: dict[str, Space] = field(default_factory=dict)

    def running(self) -> np.ndarray:
        return np.arange(LANES) if self.mask is None else np.flatnonzero(self.mask)

    def put(self, name: str, value: np.ndarray) -> None:
        if self.mask is not None:
            old = self.registers.get(name)
            value = np.where(self.mask, value, np.zeros_like(value) if old is None else old)
        self.registers[name] = value


Step = Callable[[Warp], None]


@dataclass
class Kernel:
    """``steps``: what each instruction does; ``targets``: of branches, by instruction; ``names``: opcodes."""

    steps: list[Step | None]
    guards: list[tuple[str, bool] | None]
    targets: dict[int, int]
    names: list[str]

    def run(self, warp: Warp) -> bool:
        """Until the warp waits at a barrier (True) or has ended (False)."""
        end, names = len(self.names), self.names
        while (at := int(warp.pc.min())) < end:
            here = warp.pc == at
            name, guard = names[at], self.guards[at]
            warp.pc = np.where(here, at + 1, warp.pc)
            if guard is not None:
                here = here & (warp.registers[guard[0]] == guard[1])
            warp.mask = None if here.all() else here
            if name == "bar.sync":
                if not here.all():
                    raise Fault("a barrier that not all lanes reach")
                return True
            if name == "bra":
                warp.pc = np.where(here, self.targets[at], warp.pc)
            elif name == "ret":
                warp.pc = np.where(here, end, warp.pc)
            elif (step := self.steps[at]) is not None and here.any():
                step(warp)
        return False


def run_block(
    code: Kernel,
    block: tuple[int, int, int],
    grid: tuple[int, int, int],
    memory: dict[str, Space],
    shared: int,
    threads: int,
    order: random.Random,
) -> None:
    """One block. ``shared``: bytes of shared memory; ``order``: of its warps."""
    there = Space("shared", 0, np.full(-(-shared // 16) * 16, 0xFF, np.uint8), [(0, shared)])
    warps = []
    for first in range(0, threads, LANES):
        warp = Warp(np.arange(first, first + LANES), np.zeros(LANES, np.int64), memory=memory | {"shared": there})
        where = dict(zip(SPECIAL[2:], (*block, *grid), strict=True))
        warp.place = {n: np.full(LANES, v, np.uint32) for n, v in where.items()}
        warp.place["%tid.x"], warp.place["%laneid"] = warp.tid.astype(np.uint32), np.arange(LANES, dtype=np.uint32)
        warps.append(warp)
    while warps:
        order.shuffle(warps)
        waiting = [warp for warp in warps if code.run(warp)]
        if waiting and len(waiting) < len(warps):
            raise Fault("a barrier that not all warps reach")
        warps = waiting
