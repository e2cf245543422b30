"""What must hold of the machine code of the CUDA kernels; see ``scripts/gpu_build``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from ..machine_code import Built, Usage, faults, listings, occupancy, shown
from ..triton.ahead_of_time.manifest import CLAIMS
from ..triton.launch import shared_limit
from . import build
from .plan import DTYPES, MANY, THREADS, WARPS, Machine, plan, shared_bytes

# Bytes of addresses that ``tile`` may put aside: two blocks a multiprocessor with them are faster than one without (an
# H100 at 64 and 128 tokens: by 6 and 5 %).
_PUT_ASIDE = 64
_SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (2048, 2048))


def launched(architecture: int) -> list[str]:
    """Every kernel that plans for a GPU of ``architecture`` choose, for any form of weight and number of tokens."""
    plain = Machine(lambda *_: None, 132, shared_limit(architecture))
    machines = (plain, replace(plain, ahead=lambda tile: True))
    found = {f"expand_{dtype}_w{bits}" for dtype in DTYPES for bits in (4, 8)}
    groups, tokens = (32, 64, 128, 0), (1, 8, 16, 32, 64, 128, MANY)
    sizes = itertools.product(DTYPES, (4, 8), _SHAPES, groups, tokens)
    for (dtype, bits, (n_out, n_in), group, count), machine in itertools.product(sizes, machines):
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
    found = listings(cubin)
    for name in names:
        if name not in found:
            yield f"cuda sm_{architecture}: {name} is missing in the machine code"
            continue
        yield judge(name, architecture, seconds, *found[name])


def judge(name: str, architecture: int, seconds: float, usage: Usage, code: str) -> Built:
    """One kernel. ``usage``: of registers and memory; ``code``: its machine code."""
    kind, dtype, *form = name.split("_")
    shared, limit = shared_bytes(name), shared_limit(architecture)
    blocks = occupancy(architecture, THREADS, usage.registers, shared)
    figures = (architecture, seconds, usage.registers, usage.stack + usage.local, shared, WARPS, 0, blocks)
    found = faults(code, usage, shared, limit, blocks, CLAIMS[kind], frozenset())
    if kind == "tile" and blocks >= 2 and usage.stack + usage.local <= _PUT_ASIDE:
        found = tuple(f for f in found if not f.startswith("spills"))
    return Built("linear_group_int", "-".join([kind, *form]), dtype, name, *figures, shown(code), found)
