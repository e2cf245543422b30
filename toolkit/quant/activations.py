"""What 8-bit activations lose: the inputs of W8A8 and fp8 linears rounded as runners round them, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp8, Weight
from toolkit.quant.sites import Site

EPS = 1e-7  # smallest scale, as LMDeploy's kernels have it


def round_tokens(x: Tensor, dtype: torch.dtype, group: int | None = None) -> Tensor:
    """``x`` [tokens, channels] as it comes back from int8 or float8 with a scale a token (and ``group`` channels)."""
    parts = x if group is None else torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    top = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = (parts.abs().amax(-1, keepdim=True) / top).clamp_(min=EPS)
    small = parts / scale
    back = small.round_() if dtype == torch.int8 else small.clamp_(-top, top).to(dtype).to(x.dtype)
    back = back * scale
    return back if group is None else back.flatten(1)[:, : x.shape[1]]


def input_rounding(
    sites: Sequence[Site], weights: Mapping[str, Weight | Tensor]
) -> Callable[[str, Tensor], Tensor] | None:
    """For ``layer_forward``: rounds the input of each site whose quantized linears take 8-bit activations."""
    kinds: dict[str, tuple[torch.dtype, int | None]] = {}
    for site in sites:
        for linear in site.linears:
            match weights[linear.name]:
                case ChannelInt8():
                    kinds[site.name] = (torch.int8, None)
                case Fp8() as w:
                    kinds[site.name] = (w.weight.dtype, None)
                case BlockFp8() as w:
                    kinds[site.name] = (w.weight.dtype, w.block[1])
    if not kinds:
        return None

    def apply(name: str, x: Tensor) -> Tensor:
        return round_tokens(x, *kinds[name]) if name in kinds else x

    return apply
