"""Linear layers with integer weights and 16-bit activations, by the CUDA kernels (W4A16, W8A16).

``pack`` a weight once, then ``linear(x, packed)``: one launch for few tokens, expansion and cuBLAS for many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..op import KernelError, Target, on_request
from ..reference import linear as reference
from . import driver
from .pack import Packed, pack, unsupported_form
from .plan import FEW, MANY, SCALES_BF16, WIDE, LinearArguments, Machine, Plan, plan

COLUMNS = 4096  # block columns of one launch that may meet at the end of a split sum


class Workspace:
    """Scratch memory of split sums, for launches that follow one another on one stream.

    It grows with what is reserved; captured graphs want all of it reserved before.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.partial = torch.empty(0, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(COLUMNS, dtype=torch.int32, device=device)  # zero between launches

    def reserve(self, floats: int) -> None:
        """Hold at least so many partial sums."""
        if self.partial.numel() < floats:
            self.partial = torch.empty(floats, dtype=torch.float32, device=self.partial.device)


def plan_for(packed: Packed, tokens: int, dtype: torch.dtype, machine: Machine, alike: bool = False) -> Plan | None:
    """What ``linear`` launches for ``tokens`` rows; None: it expands the weight."""
    name = str(dtype).removeprefix("torch.")
    return plan(name, packed.bits, tokens, packed.n_out, packed.n_in, packed.group_size, machine, alike)


def linear(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    machine: Machine | None = None,
    dependent: bool = False,
    alike: bool = False,
) -> Tensor:
    """``x @ W.T + bias + residual``.

    ``x``: float16 or bfloat16 [T, in]; ``bias``: [out] of its dtype; ``residual``: [T, out] of its dtype or float32,
    which the result then has. ``out``: where the result goes, of x's dtype or float32; it may be ``residual``.
    ``workspace``: scratch memory (made here if None; replayed graphs want their own); ``dependent``: launch before the
    kernel before has ended (programmatic dependent launch; only x and residual may come from it, not the weight);
    ``alike``: a row's sums are the same whatever rows come with it, ``MANY`` rows a launch.
    Returns [T, out].
    """
    machine = driver.machine(x.device) if machine is None else machine
    tokens = x.shape[0]
    _check(x, packed, bias, residual, out)
    wide = torch.float32 in (t.dtype for t in (residual, out) if t is not None)
    kind = torch.float32 if wide else x.dtype
    if tokens == 0:
        return torch.empty(0, packed.n_out, dtype=kind, device=x.device) if out is None else out
    how = plan_for(packed, tokens, x.dtype, machine, alike)
    if alike and out is None:
        out = torch.empty(tokens, packed.n_out, dtype=kind, device=x.device)
    # also where a product of an expanded weight would round: and a head is large
    if tokens > MANY and (alike or (wide and residual is None)):
        assert out is not None
        added = [None] * -(-tokens // MANY) if residual is None else residual.split(MANY)
        for part, more, its_out in zip(x.split(MANY), added, out.split(MANY), strict=True):
            linear(part, packed, bias, more, out=its_out, workspace=workspace, machine=machine, alike=alike)
        return out
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    if how is None:
        y = F.linear(x, expand(packed, x.dtype, machine), bias)
        if out is None:
            return y if residual is None else y + residual
        return out.copy_(y) if residual is None else torch.add(y, residual, out=out)
    if out is None:
        out = torch.empty(tokens, packed.n_out, dtype=kind, device=x.device)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or tokens * x.stride(0) >= 1 << 31:
        x = x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves one where it is that begins aside
    arguments = _weight_arguments(packed)
    arguments.x, arguments.out = x.data_ptr(), out.data_ptr()
    arguments.bias = None if bias is None else bias.data_ptr()
    arguments.residual = None if residual is None else residual.data_ptr()
    if how.partial:
        assert how.grid[0] * how.grid[2] <= COLUMNS, how
        workspace = workspace or Workspace(x.device)
        workspace.reserve(how.partial)
        arguments.partial, arguments.arrivals = workspace.partial.data_ptr(), workspace.arrivals.data_ptr()
    arguments.stride_x, arguments.tokens = x.stride(0), tokens
    arguments.splits, arguments.split_steps = how.splits, how.split_steps
    arguments.flags |= WIDE if wide else 0
    machine.launch(how.kernel, how.grid, arguments, dependent)
    return out


def expand(packed: Packed, dtype: torch.dtype, machine: Machine) -> Tensor:
    """The weight [out, in] in ``dtype``, rounded once; inputs in packed order."""
    out = torch.empty(packed.n_out, packed.n_in, dtype=dtype, device=packed.codes.device)
    arguments = _weight_arguments(packed)
    arguments.out = out.data_ptr()
    name = f"expand_{str(dtype).removeprefix('torch.')}_w{packed.bits}"
    machine.launch(name, (packed.tiles, -(-packed.steps // 8), 1), arguments, False)
    return out


def _check(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor | None) -> None:
    assert x.shape[1:] == (packed.n_in,) and x.dtype in (torch.float16, torch.bfloat16), (x.shape, x.dtype)
    assert bias is None or (bias.shape == (packed.n_out,) and bias.dtype == x.dtype and bias.is_contiguous())
    if residual is not None:
        assert residual.shape == (x.shape[0], packed.n_out) and residual.is_contiguous(), residual.shape
        assert residual.dtype in (x.dtype, torch.float32), residual.dtype
        assert out is None or out.dtype == residual.dtype, (out, residual.dtype)
    if out is not None:
        assert out.shape == (x.shape[0], packed.n_out) and out.is_contiguous(), out.shape
        assert out.dtype in (x.dtype, torch.float32), out.dtype
    for t in (residual, out):  # two numbers at a time
        assert t is None or packed.n_out % 2 or t.data_ptr() % (2 * t.element_size()) == 0, "begins aside"


def _weight_arguments(packed: Packed) -> LinearArguments:
    arguments = LinearArguments()
    arguments.codes, arguments.scales = packed.codes.data_ptr(), packed.scales.data_ptr()
    arguments.zeros = None if packed.zeros is None else packed.zeros.data_ptr()
    arguments.n_out, arguments.n_in = packed.n_out, packed.n_in
    arguments.groups = packed.n_in // packed.group_size
    arguments.group_shift = -1 if packed.whole else packed.group_size.bit_length() - 1
    arguments.flags = SCALES_BF16 if packed.scales.dtype == torch.bfloat16 else 0
    return arguments


def _reason(target: Target) -> str | None:
    """Why the kernels cannot run on ``target``, or cannot take a weight of its traits, or None."""
    return _form(target.traits) or driver.unavailable(target.capability)


def _form(traits: Mapping[str, Any]) -> str | None:
    if "group_size" not in traits:
        return None  # asked in general: each weight is asked for again
    if traits.get("uneven_groups"):
        return "takes an act-order index with as many inputs in each group"
    minima, scales = bool(traits.get("minima")), getattr(torch, traits.get("scale_dtype", "float16"))
    return unsupported_form(traits["bits"], traits["n_in"], traits["group_size"], minima=minima, scale_dtype=scales)


@dataclass(frozen=True)
class PackedLinear:
    """``linear`` with everything but what differs from step to step. ``wide``: sums are given in float32; ``alike``:
    see there."""

    weight: Packed
    bias: Tensor | None
    workspace: Workspace
    machine: Machine
    wide: bool = False
    alike: bool = False

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        if self.wide and out is None:
            out = torch.empty(x.shape[0], self.weight.n_out, dtype=torch.float32, device=x.device)
        return linear(
            x,
            self.weight,
            self.bias,
            residual,
            out=out,
            workspace=self.workspace,
            machine=self.machine,
            dependent=self.machine.dependent,
            alike=self.alike,
        )


def prepare(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minima: Tensor | None,
    bits: int,
    group_index: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scratch: dict[str, Any],
    machine: Machine | None = None,
    alike: bool = False,
) -> PackedLinear:
    """``linear_group_int`` of these weights, packed once; all that share ``scratch`` run one after another.

    KernelError where no kernel takes the weight.
    """
    weight = pack_canonical(packed, scales, zeros, minima, bits, group_index)
    machine = driver.machine(packed.device) if machine is None else machine
    workspace: Workspace = scratch.setdefault("cuda.linear", Workspace(packed.device))
    halves, tokens = (torch.float16, torch.bfloat16), range(FEW, MANY + 1, FEW)
    plans = (plan_for(weight, count, dtype, machine, alike) for dtype in halves for count in tokens)
    workspace.reserve(max(p.partial for p in plans if p is not None))
    return PackedLinear(weight, bias, workspace, machine, alike=alike)


@reference.linear_group_int.register(
    "cuda",
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    unsupported=_reason,
    prepare=prepare,
    alike=on_request,
)
def linear_group_int(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minima: Tensor | None,
    bits: int,
    group_index: Tensor | None = None,
    bias: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """Packs, then ``linear``. For a weight that is used again, ``prepare`` once."""
    return linear(x, pack_canonical(packed, scales, zeros, minima, bits, group_index), bias, alike=alike)


def pack_canonical(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minima: Tensor | None,
    bits: int,
    group_index: Tensor | None = None,
) -> Packed:
    """``pack`` of the weight arguments that ``linear_group_int`` takes. KernelError where no kernel takes them."""
    codes = reference.unpack_codes(packed, bits)
    n_in, groups = codes.shape[1], scales.shape[1]
    reason = unsupported_form(bits, n_in, n_in // groups, minima=minima is not None, scale_dtype=scales.dtype)
    if reason is not None:
        raise KernelError(f"linear_group_int: the cuda implementation cannot run: {reason}")
    return pack(codes, scales, zeros, bits, group_index)
