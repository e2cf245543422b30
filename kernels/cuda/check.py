"""What must hold of the machine code of the CUDA kernels; see ``scripts/gpu_build``."""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import triton

from ..triton.build import Built, occupancy
from ..triton.launch import shared_limit
from ..triton.manifest import CLAIMS
from . import build
from .plan import DTYPES, MANY, THREADS, WARPS, Machine, plan, shared_bytes

_SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (2048, 2048))
_EVIDENCE = {
    "vector": re.compile(r"\bLDG(\.\w+)*\.128\b"),
    "stores": re.compile(r"\bSTG(\.\w+)*\.128\b"),
    "shared vector": re.compile(r"\bLDS(\.\w+)*\.128\b"),
    "async": re.compile(r"\bLDGSTS(\.\w+)*\.128\b"),
    "mma": re.compile(r"\bHMMA\.16816\b"),
    "lop3": re.compile(r"\bLOP3\.LUT\b"),
}
_CONVERSION = re.compile(r"\bI2FP?\b")  # also the first step of an integer division
_LOCAL = re.compile(r"\b(LDL|STL)\b")


def launched(architecture: int) -> list[str]:
    """Every kernel that plans for a GPU of ``architecture`` choose, for any form of weight and number of tokens."""
    machine = Machine(lambda *_: None, 132, shared_limit(architecture))
    found = {f"expand_{dtype}_w{bits}" for dtype in DTYPES for bits in (4, 8)}
    groups, tokens = (32, 64, 128, 0), (1, 8, 16, 32, 64, 128, MANY)
    for dtype, bits, (n_out, n_in), group, count in itertools.product(DTYPES, (4, 8), _SHAPES, groups, tokens):
        chosen = plan(dtype, bits, count, n_out, n_in, group or n_in, machine)
        found |= set() if chosen is None else {chosen.kernel}
    return sorted(found)


def check(architecture: int, only: str | None = None) -> Iterator[Built | str]:
    """Build for ``architecture`` and look at each kernel; ``only``: whose op/kernel holds it. A str is an error."""
    names = [n for n in launched(architecture) if only is None or only in f"linear_group_int/{n}"]
    if not names:
        return
    start = time.perf_counter()
    try:
        cubin = build.build_cubin(architecture)
    except build.BuildError as error:
        yield f"cuda sm_{architecture}: {error}"
        return
    seconds = round(time.perf_counter() - start, 2)
    usage, code = _usage(cubin), _code(cubin)
    for name in names:
        if name not in usage:
            yield f"cuda sm_{architecture}: {name} is missing in the machine code"
            continue
        yield judge(name, architecture, seconds, usage[name], code[name])


def judge(name: str, architecture: int, seconds: float, usage: tuple[int, int, int], code: str) -> Built:
    """One kernel. ``usage``: registers a thread, bytes of stack and of local memory; ``code``: its machine code."""
    kind, dtype, *form = name.split("_")
    registers, stack, local = usage
    shared = shared_bytes(name)
    shows = [key for key, pattern in _EVIDENCE.items() if pattern.search(code)]
    shows += [] if _CONVERSION.search(code) else ["no conversion"]
    faults = [f"{claim} missing" for claim in sorted(CLAIMS[kind] - set(shows))]
    if stack or local or _LOCAL.search(code):
        faults.append(f"spills: {stack} bytes of stack, {local} of local memory")
    if shared > shared_limit(architecture):
        faults.append(f"{shared} bytes of shared memory, more than {shared_limit(architecture)}")
    blocks = occupancy(architecture, THREADS, registers, shared)
    if blocks < 1:
        faults.append("not one block fits a multiprocessor")
    label = "-".join([kind, *form])
    figures = (architecture, seconds, registers, stack + local, shared, WARPS, 0, blocks)
    return Built("linear_group_int", label, dtype, name, *figures, tuple(shows), tuple(faults))


def _tool(*arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _usage(cubin: Path) -> dict[str, tuple[int, int, int]]:
    found = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", _tool("-res-usage", str(cubin))
    )
    return {name: (int(registers), int(stack), int(local)) for name, registers, stack, local in found}


def _code(cubin: Path) -> dict[str, str]:
    parts = _tool("-sass", str(cubin)).split("Function : ")[1:]
    return {part.split(maxsplit=1)[0]: part for part in parts}
