"""Triton's kernels as Triton compiles them: their PTX, executed on CPU tensors, against the reference, without a GPU.

The interpreter runs a program's tensors as a whole. This runs its threads: layouts, shuffles, what warps leave for one
another in shared and in global memory, tensor cores as the assembler gets them.

    .venv/bin/python scripts/gpu/ptx/triton_kernels.py sample paged_attention

checks the cases of these ops so (one a dtype with --smoke), compiled for compute capability 8.0; what newer GPUs have
beyond that (wgmma, tensor memory) is not known here. It measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gpu.ptx.read import read
from gpu.ptx.warp import Kernel, Space, run_block, world

from toolkit.kernels.op import Target
from toolkit.kernels.registry import load
from toolkit.kernels.tolerances import compare
from toolkit.kernels.triton import launch as launching
from toolkit.kernels.triton.ahead_of_time.build import specialise
from toolkit.kernels.triton.launch import Launch

CAPABILITY = 80
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel that can be run. ``kinds``: of its parameters, in order, as "u64"; ``shared``: bytes a block has."""

    kernel: Kernel
    kinds: tuple[str, ...]
    shared: int


class Executing(list[Launch]):
    """In the place of the list that ``recording`` fills: what is put there is run. ``seed``: order of blocks and warps;
    ``ran``: names.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed, self.ran, self.known = seed, list[str](), dict[str, Compiled]()

    def append(self, launched: Launch) -> None:
        self.ran.append(launched.kernel.__name__)
        signature, constants, attributes = specialise(launched)
        given = {n: v for n, v in launched.arguments.items() if n not in constants and n not in launched.constants}
        names = [parameter.name for parameter in launched.kernel.params]
        for (i,) in list(attributes):  # Triton asks the address; ``specialise`` takes tensors to begin evenly
            value = launched.arguments[names[i]]
            if isinstance(value, Tensor) and value.data_ptr() % 16:
                del attributes[(i,)]
        key = f"{names} {signature} {constants} {sorted(attributes)} {launched.options}"
        if key not in self.known:
            self.known[key] = compiled(launched, signature, constants, attributes)
        run(self.known[key], launched, [given[name] for name in names if name in given], random.Random(self.seed))


def compiled(launched: Launch, signature: Any, constants: Any, attributes: Any) -> Compiled:
    """By Triton, for ``CAPABILITY``."""
    launching.settle(launched.kernel)
    source = ASTSource(launched.kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=launched.options)
    head, _, body = made.asm["ptx"].partition(".entry ")[2].partition("{")
    found = re.findall(r"\.param \.(\w+)[^,)]*?(\w+_param_\d+)", head)
    symbols = {name: 8 * i for i, (_, name) in enumerate(found)}
    body = re.split(r"^\s*\.(?:file|section)\b", body, flags=re.M)[0]  # behind it stands what debuggers read
    return Compiled(read(body[: body.rindex("}")], symbols), tuple(kind for kind, _ in found), made.metadata.shared)


def run(made: Compiled, launched: Launch, given: list[Any], order: random.Random) -> None:
    """All programs of a launch, one after another in ``order``."""
    words = []
    for kind, value in itertools.zip_longest(made.kinds, given, fillvalue=0):  # Triton adds pointers of its own
        if isinstance(value, Tensor):
            value = value.data_ptr()
        words.append(
            struct.pack("<f4x", value) if kind == "f32" else int(value).to_bytes(8, "little", signed=value < 0)
        )
    parameters = np.frombuffer(b"".join(words), np.uint8).copy()
    memory = {"global": world(regions(given), []), "param": Space("parameter", 0, parameters, [(0, len(parameters))])}
    grid = (*launched.grid, 1, 1)[:3]
    blocks = list(itertools.product(*(range(n) for n in grid)))
    order.shuffle(blocks)
    with np.errstate(all="ignore"):
        for block in blocks:
            run_block(made.kernel, block, grid, memory, made.shared, 32 * launched.warps, order)


def regions(given: list[Any]) -> list[tuple[int, int]]:
    """Where the memory of tensors begins and ends."""
    stores = (t.untyped_storage() for t in given if isinstance(t, Tensor))
    return [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in stores]


def check(name: str, smoke: bool = False, only: str = "", seed: int = 0) -> Iterator[Row]:
    """A row for each case of an op and dtype, ``error`` None where the kernels agree with the reference; ``only``: of
    cases whose label holds it.
    """
    op = load()[name]
    implementation = op.implementations["triton"]
    executing = Executing(seed)

    def run_here(**arguments: Any) -> Any:
        token = launching._RECORD.set((CAPABILITY, executing))
        try:
            return implementation.run(**arguments)
        finally:
            launching._RECORD.reset(token)

    judged = dataclasses.replace(implementation, run=run_here)
    for dtype in op.dtypes:
        for case in op.cases():
            wanted = Target("cuda", dtype, CAPABILITY, case.traits)
            if only not in case.label or implementation.unsupported(wanted) is not None:
                continue
            executing.ran.clear()
            error = compare(op, judged, case, Target("cpu", dtype, None, case.traits))
            yield {"what": name, "case": f"{dtype} {case.label}", "kernels": executing.ran[:], "error": error}
            if smoke:
                break


def main() -> int:
    """Check ops; a row as JSON for each case. The exit code is 1 where one does not agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="+")
    parser.add_argument("--smoke", action="store_true", help="one case a dtype")
    parser.add_argument("--only", default="", help="cases whose label holds this")
    parser.add_argument("--seed", type=int, default=0, help="order of blocks and warps")
    options, failed = parser.parse_args(), 0
    torch.set_num_threads(1)
    for name in options.ops:
        for row in check(name, options.smoke, options.only, options.seed):
            print(json.dumps(row), flush=True)
            failed += row["error"] is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
