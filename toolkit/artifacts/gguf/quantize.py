"""Rounding float weights to GGML's block types.

The types are those of llama.cpp (see ``blocks``); the search is our own: for each group a range of scales is
tried, offset and scale refitted by weighted least squares (as GPTQ-style refits do, in closed form), the best kept; for
K-quants the floats of a super-block are then refitted to the codes, and the codes to them, while the error falls.
The error is sum(weight * (x - q)**2); the weight of a column is its importance (mean of the squared input, say) or 1,
times sqrt(mean(x**2) + x**2) of its block, which lets large values count more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, GroupInt, SuperScales, Weight
from toolkit.artifacts.gguf.blocks import BLOCKS, FLOATS, BlockType
from toolkit.artifacts.join import join_rows
from toolkit.errors import ToolkitError

WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types that floats can be rounded to."""

Search = Callable[[Tensor, Tensor, BlockType], tuple[Tensor, Tensor | None]]
"""Finds a scale for each group: ``find_scales``, or another way to the same."""

_CHUNK = 1 << 18  # elements rounded at once: what bounds memory
_REFITS = 3
_MOST = 65504.0 * 128 * 32  # the largest number that a type holds: Q6_K's. The searches' squares overflow far above it


def quantize(
    weight: Tensor, kind: str, importance: Tensor | None = None, name: str = "", search: Search | None = None
) -> Weight:
    """Round ``weight`` (float [out, in]) to GGML type ``kind``, one of ``WRITTEN``.

    ``importance``: float [in], how much an error in each column counts (mean squared input), or None: all alike.
    ``search``: what finds the scales; default ``find_scales``.
    Raises ToolkitError, with ``name``, for NaN, infinity, or values that float16 cannot hold.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ToolkitError(f"{name}: holds NaN or infinity; nothing can be rounded to {kind}")
    if kind in FLOATS:
        cast = weight.to(FLOATS[kind])
        if not bool(torch.isfinite(cast).all()):
            raise ToolkitError(f"{name}: a value is beyond float16's 65504; use bf16 or f32")
        return Dense(cast)
    block, peak = BLOCKS[kind], float(weight.abs().max())
    beyond = f"{name}: weights up to {peak:.3g} need a scale beyond float16"
    if peak > _MOST:
        raise ToolkitError(beyond)
    if importance is not None:
        importance = importance.float().clamp(min=0)
        importance = importance / importance.mean().clamp(min=1e-30)
    rows = max(1, _CHUNK // weight.shape[1])
    search = search or find_scales
    parts = [_quantize_rows(part.float().contiguous(), block, importance, search) for part in weight.split(rows)]
    found = join_rows(parts)
    assert isinstance(found, GroupInt)
    supers = found.super_scales
    floats = (found.scales, found.minima) if supers is None else (supers.d, supers.dmin)
    if not all(bool(torch.isfinite(one).all()) for one in floats if one is not None):
        raise ToolkitError(beyond)
    return found


def _quantize_rows(x: Tensor, block: BlockType, importance: Tensor | None, search: Search) -> GroupInt:
    n_out = x.shape[0]
    blocks = x.view(-1, block.columns)
    spread = blocks.square()
    spread = spread.add_(spread.mean(1, keepdim=True)).sqrt_()
    if importance is not None:
        spread.view(n_out, -1).mul_(importance)
    groups = blocks.view(-1, block.group)
    counts = spread.view(-1, block.group)
    if block.name == "Q8_0":
        return _q8_0(groups, n_out)
    scale, low = search(groups, counts, block)
    if not block.supers:
        return _simple(groups, scale, low, block, n_out)
    if low is None:
        return _without_minima(groups, counts, scale, block, n_out)
    return _with_minima(groups, counts, scale, low, block, n_out)


def _q8_0(x: Tensor, n_out: int) -> GroupInt:
    """Bit for bit what llama.cpp writes: the largest value becomes 127, halves go away from zero."""
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _divide(torch.ones_like(scale), scale)
    codes = torch.trunc(scaled + torch.copysign(torch.tensor(0.5), scaled)) + 128
    scales = scale.half().view(n_out, -1)
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    return GroupInt(codes.to(torch.uint8).view(n_out, -1), scales, zeros, 8, 32)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0; ``a`` is finite."""
    return a / b.masked_fill(b == 0, torch.inf)


def find_scales(x: Tensor, counts: Tensor, block: BlockType) -> tuple[Tensor, Tensor | None]:
    """Scales and lows [groups, 1] of ``x`` [groups, group], float32; lows: of a type with minima, else None.

    ``counts``: how much the squared error of each value counts.
    """
    if block.zero is None:
        return _search_affine(x, counts, (1 << block.bits) - 1, negative=block.supers)
    return _search_symmetric(x, counts, block.zero), None


def _search_symmetric(x: Tensor, w: Tensor, half: int) -> Tensor:
    """Scales [N, 1] for codes -half … half-1; the value of largest magnitude is tried near -half, and near half-1."""
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))
    best, scale = torch.full_like(peak, -1), torch.zeros_like(peak)
    for step in range(-9, 10):
        inverse = _divide(torch.full_like(peak, -(half + 0.1 * step)), peak)
        codes = (x * inverse).round_().clamp_(-half, half - 1)
        weighted = w * codes
        xl = (weighted * x).sum(1, keepdim=True)
        ll = (weighted * codes).sum(1, keepdim=True)
        gain = _divide(xl * xl, ll)  # what the squared error falls by
        better = gain > best
        best, scale = torch.where(better, gain, best), torch.where(better, _divide(xl, ll), scale)
    return scale


def _search_affine(x: Tensor, w: Tensor, top: int, *, negative: bool) -> tuple[Tensor, Tensor]:
    """(scales, lows), each [N, 1], for x ≈ code * scale + low with codes 0 … top; ``negative``: low ≤ 0 is required."""
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    if negative:
        low = low.clamp(max=0)
    total, weighted = w.sum(1, keepdim=True), w * x
    sum_x = weighted.sum(1, keepdim=True)
    best_scale, best_low = (high - low) / top, low.clone()
    best = torch.full_like(low, torch.inf)
    for step in range(-1, 21):
        reach = top if step < 0 else top - 1.0 + 0.1 * step
        codes = ((x - low) * _divide(torch.full_like(low, reach), high - low)).round_().clamp_(0, top)
        wl = w * codes
        sum_l, sum_ll = wl.sum(1, keepdim=True), (wl * codes).sum(1, keepdim=True)
        sum_xl = (weighted * codes).sum(1, keepdim=True)
        det = total * sum_ll - sum_l * sum_l
        scale = _divide(total * sum_xl - sum_x * sum_l, det)
        offset = _divide(sum_ll * sum_x - sum_l * sum_xl, det)
        if negative:
            scale = torch.where(offset > 0, _divide(sum_xl, sum_ll), scale)
            offset = offset.clamp(max=0)
        error = (w * (codes * scale + offset - x).square()).sum(1, keepdim=True)
        better = (error < best) & (scale > 0)
        best = torch.where(better, error, best)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, offset, best_low)
    return best_scale, best_low


def _simple(x: Tensor, scale: Tensor, low: Tensor | None, block: BlockType, n_out: int) -> GroupInt:
    """Codes against the floats as they are stored, in float16."""
    stored = scale.half()
    offset = None if low is None else low.half()
    zero = 0 if block.zero is None else block.zero
    shifted = x if offset is None else x - offset.float()
    codes = _divide(shifted, stored.float()).round_().add_(zero).clamp_(0, (1 << block.bits) - 1)
    scales = stored.view(n_out, -1)
    return GroupInt(
        codes.to(torch.uint8).view(n_out, -1),
        scales,
        None if block.zero is None else torch.full(scales.shape, block.zero, dtype=torch.uint8),
        block.bits,
        block.group,
        None if offset is None else offset.view(n_out, -1),
    )


def _without_minima(x: Tensor, w: Tensor, scale: Tensor, block: BlockType, n_out: int) -> GroupInt:
    """Q6_K: signed 8-bit scales of sixteens times one float of 256."""
    assert block.zero is not None
    half = block.zero
    per_block = block.columns // block.group
    scales = scale.view(-1, per_block)
    peak = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    d = (peak / -128).half()
    sub = _divide(scales, d.float()).round_().clamp_(-128, 127)
    blocks, weights = x.view(-1, per_block, block.group), w.view(-1, per_block, block.group)

    def codes_for(d: Tensor) -> Tensor:
        return _divide(blocks, (d.float() * sub)[..., None]).round_().clamp_(-half, half - 1)

    def error(codes: Tensor, d: Tensor) -> Tensor:
        off = (codes * (d.float() * sub)[..., None]).sub_(blocks)
        return off.square_().mul_(weights).sum((1, 2))[:, None]

    def refit(codes: Tensor) -> tuple[Tensor]:
        weighted = weights * codes
        up, down = (sub * (weighted * blocks).sum(2)).sum(1), (sub * sub * weighted.mul_(codes).sum(2)).sum(1)
        return (_divide(up, down)[:, None].half(),)

    (d,), codes = _refitted((d,), codes_for, error, refit)
    supers = SuperScales(d.view(n_out, -1), sub.to(torch.int8).view(n_out, -1))
    return _from_supers((codes + block.zero), supers, block, n_out)


def _with_minima(x: Tensor, w: Tensor, scale: Tensor, low: Tensor, block: BlockType, n_out: int) -> GroupInt:
    """Q4_K, Q5_K: 6-bit scales and minima of 32 columns, each times one float of 256."""
    per_block = block.columns // block.group
    top = (1 << block.bits) - 1
    scales, lows = scale.view(-1, per_block), -low.view(-1, per_block)
    d = (scales.amax(1, keepdim=True) / 63).half()
    dmin = (lows.amax(1, keepdim=True) / 63).half()
    sub = _divide(scales, d.float()).round_().clamp_(0, 63)
    sub_min = _divide(lows, dmin.float()).round_().clamp_(0, 63)
    blocks, weights = x.view(-1, per_block, block.group), w.view(-1, per_block, block.group)

    def codes_for(d: Tensor, dmin: Tensor) -> Tensor:
        step, under = (d.float() * sub)[..., None], (dmin.float() * sub_min)[..., None]
        return _divide(blocks + under, step).round_().clamp_(0, top)

    def error(codes: Tensor, d: Tensor, dmin: Tensor) -> Tensor:
        value = (codes * (d.float() * sub)[..., None]).sub_((dmin.float() * sub_min)[..., None])
        return value.sub_(blocks).square_().mul_(weights).sum((1, 2))[:, None]

    minima = (sub_min * sub_min * weights.sum(2)).sum(1)
    minima_x = -(sub_min * (weights * blocks).sum(2)).sum(1)

    def refit(codes: Tensor) -> tuple[Tensor, Tensor]:
        """The two floats that are best for these codes: a weighted least squares of two unknowns. NaN: none."""
        weighted = weights * codes
        ab, ax = -(sub * sub_min * weighted.sum(2)).sum(1), (sub * (weighted * blocks).sum(2)).sum(1)
        aa, bb, bx = (sub * sub * weighted.mul_(codes).sum(2)).sum(1), minima, minima_x
        det = aa * bb - ab * ab
        lone = det.abs() <= 1e-6 * aa * bb  # no minima to speak of
        first = torch.where(lone, _divide(ax, aa), _divide(bb * ax - ab * bx, det))
        second = torch.where(lone, torch.zeros_like(ax), _divide(aa * bx - ab * ax, det))
        found, minimum = first[:, None].half(), second[:, None].half()
        return found.masked_fill(~((found > 0) & (minimum >= 0)), torch.nan), minimum

    (d, dmin), codes = _refitted((d, dmin), codes_for, error, refit)
    supers = SuperScales(
        d.view(n_out, -1),
        sub.to(torch.int8).view(n_out, -1),
        dmin.view(n_out, -1),
        sub_min.to(torch.int8).view(n_out, -1),
    )
    return _from_supers(codes, supers, block, n_out)


def _refitted(
    floats: tuple[Tensor, ...],
    codes_for: Callable[..., Tensor],
    error: Callable[..., Tensor],
    refit: Callable[[Tensor], tuple[Tensor, ...]],
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The floats of super-blocks refitted to the codes, and the codes to them, while the error falls."""
    codes = codes_for(*floats)
    least = error(codes, *floats)
    for _ in range(_REFITS):
        trial = refit(codes)
        trial_codes = codes_for(*trial)
        trial_error = error(trial_codes, *trial)
        better = trial_error < least
        if not bool(better.any()):
            break
        floats = tuple(torch.where(better, new, old) for new, old in zip(trial, floats, strict=True))
        least, codes = torch.where(better, trial_error, least), torch.where(better[..., None], trial_codes, codes)
    return floats, codes


def _from_supers(codes: Tensor, supers: SuperScales, block: BlockType, n_out: int) -> GroupInt:
    scales = supers.scales()
    zeros = None if block.zero is None else torch.full(scales.shape, block.zero, dtype=torch.uint8)
    flat = codes.to(torch.uint8).reshape(n_out, -1)
    return GroupInt(flat, scales, zeros, block.bits, block.group, supers.minima(), super_scales=supers)
