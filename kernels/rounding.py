"""What results that are rounded to codes, or drawn, stand for: they may end one step aside of the reference's.

Hardware multiplies and adds in one rounding, and its reciprocals and powers of two are off by some last places. A value
that lies on the border of two codes may get either; a draw on the border of two tokens may fall to either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .reference.cache import dequantize_heads, is_float8, key_bits

# Ops whose first result are codes and whose second is the scale of each row.
CODED = frozenset({"rms_norm_quant", "add_rms_norm_quant", "act_and_mul_quant"})
CACHES = frozenset({"kv_write", "rope_kv_write"})  # their last four results: codes of keys and values, and parameters
LATENT = "latent_write"  # its last two: codes of rows, and parameters
DRAWN = 1e-5  # of a row's mass: how far a draw may lie beside the token that is found
_CODE = 1.25  # steps: one code, and what a scale and a zero of another last place add
_HALF = 2.0**-9  # relative: two last places of float16

Results = list[Tensor | None]


def values(op: str, arguments: Mapping[str, Any], results: Results) -> list[tuple[Tensor | None, Tensor | None]]:
    """(what it stands for, how far the next code of it is, or None) of each of ``results`` of a call."""
    found: list[tuple[Tensor | None, Tensor | None]] = [(r, None) for r in results]
    if op in CODED:
        codes, scales = results[0], results[1]
        assert codes is not None and scales is not None
        found[0] = _of_rows(codes, scales.double()[:, None])
    elif op in CACHES:
        bits = arguments.get("bits", 0)
        keys = _of_cache(arguments, results[-4], results[-2], key_bits(bits))
        held = _of_cache(arguments, results[-3], results[-1], bits)
        found[-4:] = [keys[0], held[0], keys[1], held[1]]
    elif op == LATENT:
        found[-2:] = _of_cache(arguments, results[-2], results[-1], arguments.get("bits", 0))
    return found


def _of_rows(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    stands_for = codes.double() * scales
    if codes.dtype == torch.int8:
        return stands_for, scales.expand_as(stands_for)
    return stands_for, _float8_step(stands_for / scales, codes.dtype) * scales


def _float8_step(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """From each of ``numbers`` to the next one of ``dtype``, at most."""
    limits = torch.finfo(dtype)
    return torch.maximum(numbers.abs(), torch.full_like(numbers, limits.tiny)) * limits.eps


def _of_cache(
    arguments: Mapping[str, Any], cache: Tensor | None, params: Tensor | None, width: int
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """Of the codes of ``width`` bits and their parameters. Only what was written may be a step aside."""
    assert cache is not None
    written = torch.zeros(cache.shape[0] * cache.shape[1], 1, 1, dtype=torch.float64)
    written[arguments["slot_mapping"].cpu()] = 1.0
    written = written.view(*cache.shape[:2], 1, 1)
    if not width:
        step = _float8_step(cache.double(), cache.dtype) * written if is_float8(cache.dtype) else None
        return (cache, step), (params, None)
    assert params is not None
    scale, zero = params.double().split(1, dim=-1)
    stands_for = dequantize_heads(cache, params, width, torch.float32).double()
    border = torch.cat([scale * _HALF, zero.abs() * _HALF + 1e-3], dim=-1) * written
    return (stands_for, (_CODE * scale * written).expand_as(stands_for)), (params.double(), border)


def drawn(arguments: Mapping[str, Tensor], mass: Tensor, found: Tensor) -> Tensor:
    """bool [N]: whether each token of ``found`` lies within DRAWN of its row's draw.

    ``arguments``: of ``sample``; ``mass``: float64 [N, V], the running sum of what the row keeps, in ascending order.
    Greedy rows draw nothing and never do.
    """
    mass = mass / mass[:, -1:]
    ids = found.long().clamp(0, mass.shape[1] - 1)[:, None]
    upto = mass.gather(1, ids)[:, 0]
    before = torch.where(ids[:, 0] > 0, mass.gather(1, (ids - 1).clamp(min=0))[:, 0], torch.zeros_like(upto))
    u = arguments["u"].cpu().double()
    return (before - DRAWN <= u) & (u <= upto + DRAWN) & (arguments["temperature"].cpu() != 0)
