"""The CUDA kernels in the shapes that are served: right, and the same bits each time, launched early and in graphs too.

The cases of the op are small, for the CPU's sake: none of them goes round a ring of copies, splits columns that are
served or reaches the larger tiles. These do. The product is computed in float64 on the same device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu.checking.faults import answers, said
from gpu.machine import capability_of
from torch import Tensor

from toolkit.kernels.cuda import driver
from toolkit.kernels.cuda.linear import PackedLinear, plan_for, prepare
from toolkit.kernels.cuda.plan import Machine
from toolkit.kernels.reference.linear import dequantize_groups, pack_codes
from toolkit.kernels.tolerances import differs

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """``groups``: inputs that share a scale, 0 where all of a row's do; ``runs``: times that bits are compared."""

    n_in: tuple[int, ...] = (4096, 14336)
    n_out: tuple[int, ...] = (4096, 6144, 5003)  # the last fills no tile and no block
    groups: tuple[int, ...] = (128, 32, 0)
    tokens: tuple[int, ...] = (1, 8, 9, 16, 17, 33, 65, 128, 256)
    runs: int = 20


SERVED = Sizes()
SANITIZED = Sizes(n_in=(4096,), n_out=(523,), groups=(128,), tokens=(1, 9, 65), runs=1)
TINY = Sizes((128, 320), (40,), (32, 0), (1, 9, 40), 3)
FORMS = tuple(itertools.product((4, 8), ("float16", "bfloat16")))
# Of ``ahead``, which no plan takes before it was measured to be faster: weights and tokens that it is for.
AHEAD_FORMS = FORMS[:2]  # in 4 bits
AHEAD = replace(SERVED, groups=(128,), tokens=(33, 64, 65, 128, 256))
TINY_AHEAD = Sizes((128,), (40,), (64,), (40, 70), 3)
# How far a result may stand from the product: (relative to it, to the root mean square of all, the same of the error).
# Weights of ``tile`` are rounded to x's dtype, results always: four units in the last place, eight deviations of a sum.
CLOSE = {"float16": (2**-9, 3e-3, 8e-4), "bfloat16": (2**-6, 2e-2, 5e-3)}


@dataclass(frozen=True)
class Made:
    """A weight: packed, as it is launched early, and in float64."""

    run: PackedLinear
    early: PackedLinear | None
    dense: Tensor


def machines(device: str, ahead: bool = False) -> tuple[Machine, Machine | None]:
    """The GPU, and the same where kernels may be launched before the one before has ended. ``ahead``: with the kernels
    of that name in the place of ``tile``.
    """
    machine = driver.machine(torch.device(device))
    if ahead:
        machine = replace(machine, ahead=lambda tile: True)
    note = driver.fatbin_note(driver.FATBIN)
    capability = capability_of("cuda")
    assert note is not None and capability is not None
    waits = driver.can_wait(capability, note["architectures"])
    return machine, replace(machine, dependent=True) if waits else None


def check_linears(
    bits: int,
    dtype: str,
    device: str,
    on: tuple[Machine, Machine | None],
    sizes: Sizes = SERVED,
    wanted: Callable[[str], bool] = lambda case: True,
) -> Iterator[Row]:
    """A row for each weight and number of tokens, which names kernel and splits; ``error`` None where all held.

    ``on``: as ``machines`` gives them; ``wanted`` is asked for each case before it runs.
    """
    half: torch.dtype = getattr(torch, dtype)
    scratch: dict[str, Any] = {}
    for number, (n_in, n_out, group) in enumerate(itertools.product(sizes.n_in, sizes.n_out, sizes.groups)):
        made: Made | None = None
        for turn, tokens in enumerate(sizes.tokens):
            case = f"g{group or 'whole'} {n_out}x{n_in}, {tokens} tokens"
            if not wanted(case):
                continue
            start = time.perf_counter()
            row: Row = {"what": f"served linears, {bits} bits, {dtype}", "case": case, "skipped": None}
            try:
                made = made or _make(bits, half, device, (n_out, n_in, group or n_in), number, on, scratch)
                how = plan_for(made.run.weight, tokens, half, on[0])
                assert how is not None
                row |= {"kernel": how.kernel, "splits": how.splits}
                row["error"] = _check(made, tokens, (None, torch.float32, half)[turn % 3], sizes.runs)
                if row["error"] is not None:
                    row["error"] = f"{how.kernel}, {how.splits} splits: {row['error']}"
            except Exception as error:
                row["error"], made = said(error), None
                row |= {} if answers(device) else {"dead": True}
            yield row | {"seconds": round(time.perf_counter() - start, 2)}
            if "dead" in row:
                return


def _make(
    bits: int,
    half: torch.dtype,
    device: str,
    shape: tuple[int, int, int],
    number: int,
    on: tuple[Machine, Machine | None],
    scratch: dict[str, Any],
) -> Made:
    """A random weight (out, in, group); every second one has zeros of its own. Products come out about 1."""
    n_out, n_in, group = shape
    g = torch.Generator(device).manual_seed(number)
    codes = torch.randint(0, 1 << bits, (n_out, n_in), generator=g, device=device, dtype=torch.uint8)
    spread = n_in**0.5 * (1 << bits) / 3.5
    scales = ((torch.rand(n_out, n_in // group, generator=g, device=device) + 0.5) / spread).half()
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8, device=device)
    if number % 2 == 0:
        low, high = (1 << bits) // 4, (1 << bits) * 3 // 4
        zeros = torch.randint(low, high, scales.shape, generator=g, device=device, dtype=torch.uint8)
    bias = torch.randn(n_out, generator=g, device=device).to(half)
    packed = pack_codes(codes, bits)
    run = prepare(packed, scales, zeros, None, bits, None, bias, scratch=scratch, machine=on[0])
    dense = dequantize_groups(packed, scales, zeros, None, bits, None).double()
    return Made(run, None if on[1] is None else replace(run, machine=on[1]), dense)


def _check(made: Made, tokens: int, residual: torch.dtype | None, runs: int) -> str | None:
    """What does not hold of a product of ``tokens`` rows, ``runs`` times; None: all does."""
    run, device = made.run, made.dense.device
    g = torch.Generator(device).manual_seed(tokens)
    half = run.bias.dtype if run.bias is not None else torch.float16
    xs = torch.randn(2, tokens, run.weight.n_in, generator=g, device=device).to(half)
    added = None
    if residual is not None:
        added = torch.randn(tokens, run.weight.n_out, generator=g, device=device).to(residual)
    first = torch.stack([run(x, added) for x in xs])
    for x, found in zip(xs, first, strict=True):
        if (error := _judge(found, _product(made, x, added), half)) is not None:
            return error
    again = torch.full((runs, *first.shape[1:]), float("nan"), dtype=first.dtype, device=device)

    def all_again(linear: PackedLinear, x: Tensor) -> None:
        """Nobody waits in between: each launch follows the copy that makes its input."""
        for i, out in enumerate(again):
            x.copy_(xs[i % 2])
            linear(x, added, out=out)

    for linear, how in ((run, "run"), (made.early, "early launch")):
        if linear is None:
            continue
        again.fill_(float("nan"))
        all_again(linear, torch.empty_like(xs[0]))
        if (error := _other_bits(again, first, how)) is not None:
            return error
        if device.type == "cuda" and runs > 1:
            replay = _captured(lambda linear=linear, x=torch.empty_like(xs[0]): all_again(linear, x))  # type: ignore[misc]
            for _ in range(3):
                again.fill_(float("nan"))
                replay()
                if (error := _other_bits(again, first, f"{how} in a graph")) is not None:
                    return error
    if made.early is not None and run.weight.n_in == run.weight.n_out and runs > 1:
        y, z = xs[0], xs[0]
        for _ in range(4):
            y = run(y)
        for _ in range(4):
            z = made.early(z)
        return _other_bits(z[None], y[None], "chain of early launches")
    return None


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _product(made: Made, x: Tensor, added: Tensor | None) -> Tensor:
    """In float64."""
    found = x.double() @ made.dense.T
    found += 0 if made.run.bias is None else made.run.bias.double()
    return found if added is None else found + added.double()


def _judge(found: Tensor, expected: Tensor, half: torch.dtype) -> str | None:
    """Where ``found`` is not close to the product."""
    relative, beside, whole = CLOSE[str(half).removeprefix("torch.")]
    size = expected.square().mean().sqrt()
    error = found.double() - expected
    close = error.abs() <= relative * expected.abs() + beside * size
    if not bool(close.all()):
        return differs(expected, found, close)
    off = float(error.square().mean().sqrt() / size)
    return None if off <= whole else f"the error's root mean square is {off:.2g} of the result's, more than {whole}"


def _other_bits(again: Tensor, first: Tensor, how: str) -> str | None:
    """Which of the results ``again``, of inputs in turn, is not that of the first time."""
    for i, found in enumerate(again):
        expected = first[i % len(first)]
        same = (found == expected) | (found.isnan() & expected.isnan())
        if not bool(same.all()):
            return f"{how} {i + 1} of {len(again)} gave other bits: {differs(expected, found, same)}"
    return None
