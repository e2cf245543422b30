"""The CUDA kernels as nvcc compiles them: their PTX, executed on CPU tensors, without a GPU.

The tests' host build runs the same source with other functions in the place of the hardware's. This runs what the GPU
gets: inline assembly, its operands' order, addresses, predicates. It needs nvcc, and measures nothing.

    .venv/bin/python scripts/gpu/ptx/cuda_kernels.py --arch 90

checks small products of every form so, by the kernels for one generation of GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gpu.ptx.read import read
from gpu.ptx.warp import Kernel, Space, run_block, world

from toolkit.kernels.cuda.build import build_ptx
from toolkit.kernels.cuda.plan import THREADS, WIDE, LinearArguments, Machine, partial_sums, shared_bytes

SHARED_LIMIT = 227 * 1024
LATE = ("x", "residual", "out", "partial", "arrivals")  # what the kernel before may still write, or read


def texts(architecture: int) -> dict[str, str]:
    """The PTX of each kernel for 80, 90 …, by name."""
    parts = re.split(r"\.entry (\w+)\(", build_ptx(architecture).read_text())
    return {name: body[body.index("{") : body.rindex("}")] for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def machine(
    ptx: Mapping[str, str],
    *,
    multiprocessors: int = 4,
    seed: int = 0,
    dependent: bool = False,
    log: list[tuple[str, tuple[int, int, int]]] | None = None,
) -> Machine:
    """A machine that is this process and runs ``ptx``. ``seed``: order of blocks and warps; ``dependent``: as if the
    kernel before still ran; ``log`` collects (kernel, grid).
    """
    kernels: dict[str, Kernel] = {}

    def launch(name: str, grid: tuple[int, int, int], arguments: LinearArguments, early: bool) -> None:
        if log is not None:
            log.append((name, grid))
        if name not in kernels:
            kernels[name] = read(ptx[name])
        run(kernels[name], name, grid, arguments, early, random.Random(seed))

    return Machine(launch, multiprocessors, SHARED_LIMIT, dependent)


def run(
    kernel: Kernel,
    name: str,
    grid: tuple[int, int, int],
    arguments: LinearArguments,
    early: bool,
    order: random.Random,
) -> None:
    """All blocks of a grid, one after another in ``order``."""
    where = regions(name, arguments, grid)
    late = [where[n] for n in LATE if n in where] if early else []
    given = np.frombuffer(bytes(arguments), np.uint8).copy()
    memory = {
        "global": world(list(where.values()), late),
        "param": Space("parameter", 0, given, [(0, len(given))]),
    }
    blocks = list(itertools.product(*(range(n) for n in grid)))
    order.shuffle(blocks)
    with np.errstate(all="ignore"):
        for block in blocks:
            run_block(kernel, block, grid, memory, shared_bytes(name), THREADS, order)


def regions(name: str, p: LinearArguments, grid: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """Where each tensor of a launch begins and ends, as ``kernels/cuda/pack.py`` lays out weights."""
    bits, expands = (8 if "_w8" in name else 4), name.startswith("expand")
    rows, number = -(-p.n_out // 16) * 16, 4 if p.flags & WIDE else 2
    sizes = {
        "x": ((p.tokens - 1) * p.stride_x + p.n_in) * 2,
        "codes": rows * p.n_in * bits // 8,
        "scales": rows * p.groups * (4 if p.group_shift < 0 else 2),
        "zeros": rows * p.groups,
        "bias": p.n_out * 2,
        "residual": p.tokens * p.n_out * number,
        "out": p.n_out * p.n_in * 2 if expands else p.tokens * p.n_out * number,
        "partial": 0 if expands else 4 * partial_sums(name, grid, p.tokens, p.n_out),
        "arrivals": grid[0] * grid[2] * 4,
    }
    return {n: (at, at + size) for n, size in sizes.items() if (at := getattr(p, n))}


def main() -> int:
    """Check; a row as JSON for each case. The exit code is 1 where one does not agree."""
    from gpu.checking.linears import FORMS, TINY, check_linears

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, help="compute capability, as 80 or 90")
    ptx = texts(parser.parse_args().arch)
    on, failed = (machine(ptx, multiprocessors=8), machine(ptx, multiprocessors=8, dependent=True)), 0
    for bits, dtype in FORMS:
        for row in check_linears(bits, dtype, "cpu", on, TINY):
            print(json.dumps(row), flush=True)
            failed += row["error"] is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
