"""Linear layers of a model: canonical weights prepared for a device, and fused where they share their input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from toolkit import kernels
from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp4, Fp8, GroupInt, Weight
from toolkit.artifacts.join import join_rows
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.kernels.reference.linear import pack_codes
from toolkit.runners.tensor.devices.find import kernel_target
from toolkit.runners.tensor.ops import Ops

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rounded:
    """Activations as a W8A8 linear multiplies them: ``codes`` [T, in] of int8 or float8, float32 ``scales`` [T]."""

    codes: Tensor
    scales: Tensor


Activations = Tensor | Rounded
Linear = Callable[[Activations], Tensor]


@dataclass(frozen=True)
class Placement:
    """Where and how weights live. ``dequantize``: weights whose activations are not rounded become dense at load;
    ``alike``: a row's numbers are the same whatever rows come with it."""

    device: torch.device
    dtype: torch.dtype
    dequantize: bool
    alike: bool = False
    scratch: dict[str, Any] = field(default_factory=dict)  # of kernels, shared by what runs one after another


@dataclass(frozen=True)
class Bound:
    """A kernel with everything but x: ``kernel(x, *constants)``."""

    kernel: Callable[..., Any]
    constants: tuple[Any, ...]

    def __call__(self, x: Activations) -> Tensor:
        return self.kernel(x, *self.constants)


@dataclass(frozen=True)
class RowScaled:
    """A W8A8 linear: rounds its input, or takes it rounded (``matmul``), so that a norm can do it on its way."""

    linear: Callable[..., Any]
    matmul: Callable[..., Any]
    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    def __call__(self, x: Activations) -> Tensor:
        if isinstance(x, Rounded):
            return self.matmul(x.codes, x.scales, self.weight, self.scales, self.dtype, self.bias)
        return self.linear(x, self.weight, self.scales, self.bias)


def codes_of(linear: Linear) -> torch.dtype | None:
    """What ``linear`` rounds its input to, if it takes it ``Rounded``; else None."""
    return linear.weight.dtype if isinstance(linear, RowScaled) else None


@dataclass(frozen=True)
class Joined:
    """Linears over one input whose weights cannot be one matrix; their outputs are joined."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Activations) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def make_linear(weights: Sequence[Weight], biases: Sequence[Tensor | None], place: Placement, ops: Ops) -> Linear:
    """One callable for linears that share their input; their outputs stand one after another."""
    prepared = [_prepare(w, place) for w in weights]
    sizes = [w.shape[0] for w in prepared]
    ordered = len(prepared) > 1 and any(isinstance(w, GroupInt) and w.group_index is not None for w in prepared)
    whole = None if ordered else join_rows(prepared)
    bias = _fuse_biases(biases, sizes, place)
    if whole is None:
        each = [None] * len(sizes) if bias is None else bias.split(sizes)
        return Joined(tuple(_bind(w, b, place, ops) for w, b in zip(prepared, each, strict=True)))
    return _bind(whole, bias, place, ops)


def becomes_dense(weight: Weight, place: Placement) -> bool:
    """Whether ``weight`` is held as a floating point matrix."""
    if isinstance(weight, (GroupInt, Fp4)):
        return place.dequantize
    if isinstance(weight, BlockFp8) and (place.dequantize or not even_block(weight.block[1])):
        return True
    if isinstance(weight, (ChannelInt8, Fp8, BlockFp8)):
        return False
    return True  # forms that no kernel takes as they are


def even_block(block: int) -> bool:
    """Whether kernels take blocks of so many inputs."""
    return block >= 32 and block & (block - 1) == 0


def _prepare(weight: Weight, place: Placement) -> Weight:
    return Dense(weight.dequantize(place.dtype)) if becomes_dense(weight, place) else weight


def _fuse_biases(biases: Sequence[Tensor | None], sizes: Sequence[int], place: Placement) -> Tensor | None:
    if all(b is None for b in biases):
        return None
    parts = [torch.zeros(n) if b is None else b.float().cpu() for b, n in zip(biases, sizes, strict=True)]
    return torch.cat(parts).to(place.device, place.dtype)


def group_linear(weight: GroupInt, constants: tuple[Any, ...], place: Placement, ops: Ops) -> Linear:
    """On a GPU by the kernels that take this weight's form, which may pack it once more for themselves.

    Where these are not the CUDA ones, a warning says why, once for each reason.
    """
    device, capability = kernel_target(place.device)
    if device != "cuda":
        return Bound(ops.linear_group_int, constants)
    groups, uneven = weight.scales.shape[1], False
    if weight.group_index is not None:
        uneven = torch.bincount(weight.group_index.long(), minlength=groups).unique().numel() > 1
    traits = {
        "bits": weight.bits,
        "group_size": weight.shape[1] // groups,
        "n_in": weight.shape[1],
        "minima": weight.minima is not None,
        "scale_dtype": str(weight.scales.dtype).removeprefix("torch."),
        "uneven_groups": uneven,
        "alike": place.alike,
    }
    target = kernels.Target(device, str(place.dtype).removeprefix("torch."), capability, traits)
    op = kernels.load()["linear_group_int"]
    try:
        chosen = kernels.choose(op, target, trusted=False)
    except kernels.KernelError as error:
        raise UsageError(str(error)) from None
    reason = op.implementations["cuda"].unsupported(target)
    if chosen.family != "cuda" and reason is not None:
        said: set[str] = place.scratch.setdefault("said", set())
        if reason not in said:
            said.add(reason)
            log.warning("integer weights: the cuda kernel is not used (%s), %s's runs instead", reason, chosen.family)
    if chosen.prepare is None:
        return Bound(chosen.run_on(target), constants)
    packed: Linear = chosen.prepare(*constants, scratch=place.scratch, alike=place.alike)
    return packed


def _bind(weight: Weight, bias: Tensor | None, place: Placement, ops: Ops) -> Linear:
    def put(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(place.device)

    if isinstance(weight, Dense):
        return Bound(ops.linear, (put(weight.weight), bias))
    if isinstance(weight, GroupInt):
        packed = put(pack_codes(weight.codes, weight.bits))
        zeros = None if weight.minima is not None else put(weight.zeros)
        index = put(weight.group_index)
        constants = (packed, put(weight.scales), zeros, put(weight.minima), weight.bits, index, bias)
        return group_linear(weight, constants, place, ops)
    if isinstance(weight, BlockFp8):
        rows = put(weight.block_of_rows().int())
        return Bound(ops.linear_block_fp8, (put(weight.weight), put(weight.scales), rows, weight.block[1], bias))
    if isinstance(weight, Fp4):
        factors = None
        if weight.global_scale is not None:
            factors = put((1 / weight.global_scale.float()).expand(weight.shape[0]).contiguous())
        return Bound(ops.linear_fp4, (put(pack_codes(weight.codes, 4)), put(weight.scales), factors, bias))
    assert isinstance(weight, (ChannelInt8, Fp8)), type(weight)
    integer = isinstance(weight, ChannelInt8)
    linears = (ops.linear_int8, ops.matmul_int8) if integer else (ops.linear_fp8, ops.matmul_fp8)
    device = place.device
    return RowScaled(*linears, weight.weight.to(device), weight.scales.to(device), bias, place.dtype)
