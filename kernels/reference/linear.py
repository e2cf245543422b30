"""Linear layers, one op for each form of weight. Weights act as ``y = x @ W.T (+ bias)``.

Integer activations follow SmoothQuant (Xiao et al., 2023): one symmetric scale a token, found at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op import Case
from ..registry import op

SHAPES = (("one", 1, 96, 40), ("few", 5, 64, 48), ("many", 33, 128, 24))


def _dense_cases() -> Iterator[Case]:
    for label, tokens, n_in, n_out in SHAPES:

        def make(dtype, device, g, tokens=tokens, n_in=n_in, n_out=n_out) -> dict[str, Any]:
            args = {"x": torch.randn(tokens, n_in, generator=g), "weight": torch.randn(n_out, n_in, generator=g) / 8}
            bias = torch.randn(n_out, generator=g) if tokens > 1 else None
            return {k: v.to(device, dtype) for k, v in args.items()} | {
                "bias": None if bias is None else bias.to(device, dtype)
            }

        yield Case(label, make)


@op(_dense_cases)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Floating point weight. ``x``: [T, in]; ``weight``: [out, in] of x's dtype; sums in float32. Returns [T, out]."""
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def codes_per_byte(bits: int) -> int:
    """How many codes ``pack_codes`` puts in a byte: 8 // bits, except that 3-bit codes have a byte each."""
    return 1 if bits == 3 else 8 // bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [out, in], each below 2**bits -> uint8 [out, in / codes_per_byte], the first code lowest."""
    n = codes_per_byte(bits)
    if n == 1:
        return codes.contiguous()
    assert codes.shape[-1] % n == 0, (codes.shape, bits)
    parts = codes.unflatten(-1, (-1, n)).unbind(-1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (bits * i)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of ``pack_codes``."""
    n = codes_per_byte(bits)
    if n == 1:
        return packed
    mask = (1 << bits) - 1
    return torch.stack([(packed >> (bits * i)) & mask for i in range(n)], dim=-1).flatten(-2)


def _group_cases() -> Iterator[Case]:
    forms = [("zeros4", 4, 32, False, False), ("minima4", 4, 32, True, False), ("zeros8", 8, 64, False, False)]
    forms += [("order3", 3, 32, False, True), ("zeros2", 2, 32, False, False), ("order4", 4, 64, False, True)]
    cases = [(5, 128, *form) for form in forms]  # tokens, inputs; then those that other kernels take
    cases += [(tokens, 128, f"tokens{tokens}", 4, 64, False, False) for tokens in (12, 40, 70, 400)]
    cases += [(tokens, 128, f"bytes{tokens}", 8, 64, False, False) for tokens in (12, 70)]
    cases += [(1, 2048, "long1", 4, 128, False, False), (9, 1024, "long9", 4, 1024, False, False)]
    for tokens, n_in, label, bits, group, minima, order in cases:

        def make(
            dtype, device, g, tokens=tokens, n_in=n_in, bits=bits, group=group, minima=minima, order=order
        ) -> dict[str, Any]:
            out = 24
            codes = torch.randint(0, 1 << bits, (out, n_in), generator=g, dtype=torch.uint8)
            scales = (torch.rand(out, n_in // group, generator=g) + 0.1) / (8 << bits)
            zeros = torch.randint(0, 1 << bits, scales.shape, generator=g, dtype=torch.uint8)
            floor = torch.randn(scales.shape, generator=g) / 8
            index = (torch.randperm(n_in, generator=g) // group).int()
            return {
                "x": torch.randn(tokens, n_in, generator=g).to(device, dtype),
                "packed": pack_codes(codes, bits).to(device),
                "scales": scales.to(device, torch.float16),
                "zeros": None if minima else zeros.to(device),
                "minima": floor.to(device, torch.float16) if minima else None,
                "bits": bits,
                "group_index": index.to(device) if order else None,
                "bias": torch.randn(out, generator=g).to(device, dtype),
            }

        traits = {"bits": bits, "group_size": group, "n_in": n_in, "minima": minima, "scale_dtype": "float16"}
        yield Case(label, make, traits)


def dequantize_groups(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None, bits: int, group_index: Tensor | None
) -> Tensor:
    """The float32 weight [out, in] that ``linear_group_int`` multiplies by."""
    codes = unpack_codes(packed, bits).float()
    offsets = zeros if minima is None else minima
    assert offsets is not None
    if group_index is None:
        per_group = codes.shape[1] // scales.shape[1]
        codes = codes.unflatten(1, (-1, per_group))
        scale, offset = scales.float()[..., None], offsets.float()[..., None]
    else:
        scale, offset = scales.float()[:, group_index.long()], offsets.float()[:, group_index.long()]
    w = (codes - offset) * scale if minima is None else codes * scale + offset
    return w.flatten(1) if group_index is None else w


@op(
    _group_cases,
    gate=(
        *("zeros4", "minima4", "zeros8", "order3", "zeros2", "order4"),
        *("tokens12", "tokens70", "tokens400", "bytes12", "bytes70", "long1"),
    ),
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
) -> Tensor:
    """Integer weight in groups along the input, activations in floating point (W4A16 and kin).

    ``packed``: uint8 from ``pack_codes``; ``scales``: [out, groups] float; exactly one of ``zeros`` (uint8:
    w = (code - zero)·scale) and ``minima`` (float: w = code·scale + minimum), both [out, groups]; ``group_index``:
    int32 [in], the group of each input where groups are not consecutive. The weight is rounded to x's dtype. Returns
    [T, out].
    """
    weight = dequantize_groups(packed, scales, zeros, minima, bits, group_index).to(x.dtype)
    return linear.reference(x, weight, bias)


def _row_scaled_cases(weight_dtype: torch.dtype) -> Iterator[Case]:
    for label, tokens, n_in, n_out in SHAPES:

        def make(dtype, device, g, tokens=tokens, n_in=n_in, n_out=n_out) -> dict[str, Any]:
            if weight_dtype == torch.int8:
                weight = torch.randint(-127, 128, (n_out, n_in), generator=g, dtype=torch.int8)
            else:
                weight = (torch.randn(n_out, n_in, generator=g) * 100).to(weight_dtype)
            return {
                "x": torch.randn(tokens, n_in, generator=g).to(device, dtype),
                "weight": weight.to(device),
                "scales": ((torch.rand(n_out, generator=g) + 0.5) / 1000).to(device),
                "bias": torch.randn(n_out, generator=g).to(device, dtype) if tokens > 1 else None,
            }

        yield Case(label, make)


def quantize_rows(x: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """(x / scale in float32, scale [T, 1]) with scale = max|x| / ``top`` a row; an all-zero row gets scale 1."""
    h = x.float()
    peak = h.abs().amax(-1, keepdim=True)
    scale = peak / torch.full_like(peak, top)  # by a number GPUs do not divide: torch multiplies by its reciprocal
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return h / scale, scale


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations for a W8A8 product: (codes of ``dtype``, float32 scales of the rows), x ≈ codes · scale.

    ``x``: [..., size]; ``dtype``: int8 (max|x| becomes 127), or a float8 type (it becomes the type's largest number).
    """
    integer = dtype == torch.int8
    h, scale = quantize_rows(x, 127.0 if integer else torch.finfo(dtype).max)
    return (h.round().clamp(-127, 127) if integer else h).to(dtype), scale[..., 0]


def _codes_cases(dtype_of_codes: torch.dtype) -> Iterator[Case]:
    for case in _row_scaled_cases(dtype_of_codes):

        def make(dtype, device, g, case=case) -> dict[str, Any]:
            args = case.make(dtype, "cpu", g)
            codes, row_scales = round_rows(args.pop("x"), dtype_of_codes)
            args = {"codes": codes, "row_scales": row_scales} | args
            return {k: v if v is None else v.to(device) for k, v in args.items()} | {"dtype": dtype}

        yield Case(case.label, make)


@op(lambda: _codes_cases(torch.int8), gate=("one", "many"))
def matmul_int8(
    codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``linear_int8`` on activations that are rounded already: the integer sum is exact.

    ``codes``: int8 [T, in] with ``row_scales`` float32 [T]; ``weight``: int8 [out, in] with ``scales`` float32 [out].
    Returns [T, out] in ``dtype``.
    """
    y = (codes.double() @ weight.double().T).float() * row_scales[:, None] * scales
    return (y if bias is None else y + bias.float()).to(dtype)


@op(lambda: _codes_cases(torch.float8_e4m3fn), gate=("one", "many"))
def matmul_fp8(
    codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``linear_fp8`` on activations that are rounded already; ``codes`` and ``weight`` have one float8 type."""
    y = (codes.float() @ weight.float().T) * row_scales[:, None] * scales
    return (y if bias is None else y + bias.float()).to(dtype)


@op(lambda: _row_scaled_cases(torch.int8), gate=("one", "many"))
def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """W8A8: activations are rounded to int8 with one scale a token (max|x| / 127); the integer sum is exact.

    ``x``: [T, in] float; ``weight``: int8 [out, in]; ``scales``: float32 [out]. Returns [T, out] in x's dtype.
    """
    return matmul_int8.reference(*round_rows(x, torch.int8), weight, scales, x.dtype, bias)


@op(lambda: _row_scaled_cases(torch.float8_e4m3fn), gate=("one", "many"))
def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """W8A8 in floating point: activations are rounded to the weight's float8 type with one scale a token.

    ``weight``: float8_e4m3fn or float8_e5m2 [out, in]; ``scales``: float32 [out]. Sums in float32. Returns x's dtype.
    """
    return matmul_fp8.reference(*round_rows(x, weight.dtype), weight, scales, x.dtype, bias)
