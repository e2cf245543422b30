"""Launching a kernel, or recording the launch instead so that it can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..op import Target

INTERPRETED = bool(triton.knobs.runtime.interpret)  # the interpreter knows no inline assembly and computes no bf16
EARLY_CAPABILITY = 90  # from which on a kernel may begin while the one before it ends
ALIKE_ROWS = 64  # of a tile whose sums are to be the same whatever rows come together: the least of Hopper's products
FUSED = True  # a product and a sum are one instruction; Triton's default changes with 3.10
NATIVE_FLOAT8 = 89  # compute capability from which on tensor cores multiply float8


@dataclass(frozen=True)
class Launch:
    """One recorded launch. ``arguments``: run-time arguments by name; ``constants``: compile-time ones; ``registers``:
    a thread's at most, None where the assembler chooses.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int | None

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told besides arguments and constants."""
        chosen = {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}
        return chosen | {"enable_fp_fusion": FUSED}


_RECORD: ContextVar[tuple[int, list[Launch]] | None] = ContextVar("record", default=None)


@contextmanager
def recording(capability: int) -> Iterator[list[Launch]]:
    """Inside, launches are appended to the list and nothing runs; tensors may be on the meta device.

    ``capability``: of the GPU that the launches are meant for, as 80 or 90.
    """
    found: list[Launch] = []
    token = _RECORD.set((capability, found))
    try:
        yield found
    finally:
        _RECORD.reset(token)


def capability_of(device: torch.device) -> int:
    """Compute capability that launches on ``device`` are chosen for; on a CPU (the interpreter) that of an H200."""
    record = _RECORD.get()
    if record is not None:
        return record[0]
    if device.type != "cuda":
        return 90
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _capability(index: int) -> int:
    """Of a GPU; torch takes microseconds for it, and every launch asks."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def from_shared(capability: int) -> bool:
    """Whether products of many rows read their operands from shared memory (wgmma, tcgen05); elsewhere, compute
    capability 12 included, registers must hold them.
    """
    return 90 <= capability < 120


def tensor_memory(capability: int) -> bool:
    """Whether products of many rows leave their sums in tensor memory, to be read from there into registers all at
    once (compute capability 10, not 12).
    """
    return 100 <= capability < 120


def shared_limit(capability: int) -> int:
    """Bytes of shared memory that one block may ask for."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99) * 1024


def stages_of(device: torch.device, stage: int, held: int = 0, most: int = 5) -> int:
    """How many stages of a pipeline half of the shared memory holds, the rest being for a second block: 2 to ``most``.
    ``stage``: bytes of one; ``held``: bytes of what stays, such as the sums.
    """
    return max(2, min(most, (shared_limit(capability_of(device)) // 2 - held) // stage))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int = 4,
    stages: int = 2,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """``kernel[grid](*arguments, **constants)`` on the device of its tensors; an empty grid launches nothing.

    A kernel's parameter ``EARLY`` is filled in here: see ``let_next_begin``.

    ``registers``: a thread's at most. Without it the assembler spills some to leave room for one block more on the
    multiprocessor, not knowing that shared memory may have none.
    """
    if 0 in grid:
        return
    first = next(a for a in arguments if isinstance(a, Tensor))
    if "EARLY" in kernel.arg_names:
        constants["EARLY"] = not INTERPRETED and capability_of(first.device) >= EARLY_CAPABILITY
    record = _RECORD.get()
    if record is not None:
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        record[1].append(Launch(kernel, grid, named, constants, warps, stages, registers))
        return
    if not INTERPRETED:
        settle(kernel)
    elsewhere = first.is_cuda and first.device.index != torch.cuda.current_device()
    with torch.cuda.device(first.device) if elsewhere else nullcontext():
        kernel[grid](
            *arguments, num_warps=warps, num_stages=stages, maxnreg=registers, enable_fp_fusion=FUSED, **constants
        )


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The next kernel may be launched, if it was told to wait itself for what this one writes (programmatic dependent
    launch): the CUDA linears load weights meanwhile. ``launch`` knows ``EARLY``.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


def settle(function: Any) -> None:
    """Have Triton compute the cache key of a kernel, those of the functions it calls first.

    Triton takes the constants that a called function reads into the caller's key only where it has the function's key
    already: else a kernel's key would depend on the kernels that came before it in the process, and what another
    process compiled would not be found.
    """
    if function.hash is None:
        for name in function.fn.__code__.co_names:
            called = function.fn.__globals__.get(name)
            if isinstance(called, triton.JITFunction):
                settle(called)
        assert function.cache_key


def dot_dtype(dtype: torch.dtype) -> Any:
    """What operands of a matrix product are cast to: the dtype itself, but float32 for bf16 in the interpreter."""
    if dtype == torch.float32 or (INTERPRETED and dtype == torch.bfloat16):
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def needs(capability: int = 80, more: Callable[[Target], str | None] | None = None) -> Callable[[Target], str | None]:
    """``unsupported`` of an implementation: compute capability at least ``capability``, then what ``more`` says."""

    def unsupported(target: Target) -> str | None:
        found = target.capability
        if found is not None and found < capability:
            want = f"{capability // 10}.{capability % 10}"
            return f"needs compute capability {want} or newer, this GPU has {found // 10}.{found % 10}"
        return more(target) if more is not None else None

    return unsupported
