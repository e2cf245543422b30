"""Which kernel runs a linear layer, on what grid; and how it is called."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, field

THREADS, WARPS = 256, 8  # of every block
FEW, MANY = 16, 256  # tokens up to which ``few`` runs; above which the weight is expanded for cuBLAS
ALIKE = 64  # tokens that a plan is made for where sums are to be the same whatever tokens come together
SCALES_BF16, WIDE = 1, 2  # LinearFlags of linear.h
DTYPES = ("float16", "bfloat16")
SPANS = (0, 32, 64)
_TILES, _DEPTH_FEW = 2, 4  # tiles of 16 outputs a block of ``few``, a warp of ``tile``; steps that are on their way
_RESIDENT_FEW, _WANTED_FEW = 2, 4  # blocks of ``few`` a multiprocessor holds at least, and is given where it holds more
_ACROSS, _LEAST = 4, 8  # of ``tile``: warps across outputs; steps of a split at least


class LinearArguments(ctypes.Structure):
    """tk::Linear of linear.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "codes", "scales", "zeros", "bias", "residual", "out")),
        *((name, c_void_p) for name in ("partial", "arrivals")),
        ("stride_x", c_int64),
        *((name, c_int32) for name in ("tokens", "n_out", "n_in", "groups", "group_shift")),
        *((name, c_int32) for name in ("splits", "split_steps", "flags")),
    )


Launch = Callable[[str, tuple[int, int, int], LinearArguments, bool], None]


@dataclass(frozen=True)
class Machine:
    """What kernels run on. ``launch(kernel, grid, arguments, dependent)``; ``shared_limit``: bytes a block may have;
    ``dependent``: whether weights that were prepared are launched before the kernel before has ended; ``resident``:
    blocks of a kernel that one multiprocessor holds, where it is known; ``ahead``: whether ``ahead`` is faster than the
    ``tile`` of this name here.
    """

    launch: Launch
    multiprocessors: int
    shared_limit: int
    dependent: bool = False
    resident: Mapping[str, int] = field(default_factory=dict)
    ahead: Callable[[str], bool] = lambda tile: False


@dataclass(frozen=True)
class Plan:
    """A kernel and its grid. ``splits``: parts of the inputs, whose sums meet in ``partial`` floats of scratch."""

    kernel: str
    grid: tuple[int, int, int]
    splits: int = 1
    split_steps: int = 0
    partial: int = 0


def names() -> list[str]:
    """Every kernel of ``linear.cu``."""
    found = []
    for dtype in DTYPES:
        for span in SPANS:
            found += [few_name(dtype, bits, span, columns) for bits in (4, 8) for columns in (1, 2)]
            found += [tile_name(dtype, bits, span, columns) for bits in (4, 8) for columns in _widths(bits, span)]
        found += [f"expand_{dtype}_w{bits}" for bits in (4, 8)]
        found += [ahead for columns in (8, 16) if (ahead := ahead_of(tile_name(dtype, 4, 64, columns))) is not None]
    return found


def few_name(dtype: str, bits: int, span: int, columns: int) -> str:
    return f"few_{dtype}_w{bits}_s{span}_n{columns}"


def tile_name(dtype: str, bits: int, span: int, columns: int) -> str:
    return f"tile_{dtype}_w{bits}_s{span}_n{columns}"


def ahead_of(tile: str) -> str | None:
    """The kernel that does what ``tile`` does with codes unpacked ahead, None where there is none."""
    return tile.replace("tile", "ahead") if tile.endswith(("w4_s64_n8", "w4_s64_n16")) else None


def _widths(bits: int, span: int) -> tuple[int, ...]:
    """Columns of 8 tokens that a block of ``tile`` may have; 16 in groups of 32 would want too many registers."""
    return (4, 8) if bits == 8 and span == 32 else (4, 8, 16)


def _sides(bits: int, columns: int) -> int:
    """Rows of warps of ``tile`` that share the tokens of a block; the others share its inputs."""
    return 2 if bits == 4 and columns == 16 else 1


def shared_bytes(kernel: str) -> int:
    """Dynamic shared memory of a kernel; the constants of its class in C++."""
    kind, _, *form = kernel.split("_")
    if kind == "expand":
        return 0
    bits, span = int(form[0][1:]), int(form[1][1:])
    chunks = 0 if span == 0 else 2 if span == 32 else 1
    if kind == "few":
        return _DEPTH_FEW * _TILES * THREADS * (16 * bits // 4 + 8 * chunks)
    columns = int(form[2][1:])
    tiles, sides = _TILES, _sides(bits, columns)
    stage = (2 * 8 * columns * 128 + tiles * THREADS * 4 * bits + WARPS * tiles * chunks * 48) // sides
    return max((4 if kind == "ahead" else 3) * stage, _ACROSS * tiles * columns * 512) + 16


def span_of(group_size: int, n_in: int) -> int:
    """Inputs of a step of 64 that share a scale; 0 where all of a row's do."""
    return 0 if group_size == n_in else min(group_size, 64)


def plan(
    dtype: str,
    bits: int,
    tokens: int,
    n_out: int,
    n_in: int,
    group_size: int,
    machine: Machine,
    alike: bool = False,
) -> Plan | None:
    """The kernel for these sizes; None where expansion and cuBLAS are for it. ``alike``: for up to ``MANY`` tokens all
    is as for ``ALIKE`` of them, but that there are as many tiles of tokens as it takes.

    Inputs are split where the outputs alone would leave multiprocessors idle.
    """
    span, tiles, steps = span_of(group_size, n_in), -(-n_out // 16), n_in // 64
    rows = ALIKE if alike else tokens
    if rows <= FEW:
        width = 1 if rows <= 8 else 2
        kernel, columns, height = few_name(dtype, bits, span, width), 8 * width, _TILES
        held = min(_WANTED_FEW, machine.resident.get(kernel, _RESIDENT_FEW))
        wanted, least = held * machine.multiprocessors, 2 * WARPS
    elif rows <= MANY:
        widths = _widths(bits, span)
        width = next((c for c in widths if rows <= 8 * c), widths[-1])
        while width > widths[0] and shared_bytes(tile_name(dtype, bits, span, width)) > machine.shared_limit:
            width //= 2
        kernel, columns, height = tile_name(dtype, bits, span, width), 8 * width, _TILES * _ACROSS
        ahead = ahead_of(kernel)
        if ahead is not None and shared_bytes(ahead) <= machine.shared_limit and machine.ahead(kernel):
            kernel = ahead
        wanted, least = machine.resident.get(kernel, 1) * machine.multiprocessors, _LEAST
    else:
        return None
    across, down = -(-tiles // height), -(-tokens // columns)
    splits = max(1, min(wanted // (across * -(-rows // columns)), steps // least))
    split_steps = -(-steps // splits)
    splits = -(-steps // split_steps)
    grid = (across, splits, down)
    partial = partial_sums(kernel, grid, tokens, n_out) if splits > 1 else 0
    return Plan(kernel, grid, splits, split_steps, partial)


def partial_sums(kernel: str, grid: tuple[int, int, int], tokens: int, n_out: int) -> int:
    """Floats that the parts of a split sum take: of ``tile`` whole blocks, of ``few`` what there is."""
    kind, *_, columns = kernel.split("_")
    if kind == "few":
        return grid[1] * tokens * -(-n_out // 16) * 16
    return math.prod(grid) * _ACROSS * _TILES * 16 * 8 * int(columns[1:])
