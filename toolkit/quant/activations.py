"""What 8-bit activations lose: the inputs of W8A8 and fp8 linears rounded as runners round them, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp8, Weight
from toolkit.kernels.torch.product import int8_product
from toolkit.quant.sites import Site

EPS = 1e-7  # smallest scale, as LMDeploy's kernels have it


def round_tokens(x: Tensor, dtype: torch.dtype, group: int | None = None) -> Tensor:
    """``x`` [tokens, channels] as it comes back from int8 or float8 with a scale a token (and ``group`` channels)."""
    parts = x if group is None else torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    codes, scale = token_codes(parts, dtype)
    back = codes.to(x.dtype) * scale
    return back if group is None else back.flatten(1)[:, : x.shape[1]]


def token_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` [..., n], those of int8 still in its float type, and their scales [..., 1]."""
    top = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = (x.abs().amax(-1, keepdim=True) / top).clamp_(min=EPS)
    small = x / scale
    return small.round_() if dtype == torch.int8 else small.clamp_(-top, top).to(dtype), scale


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


class Int8Linears:
    """A layer's W8A8 linears as a runner runs them, in integers: the numbers that rounded inputs and dequantized
    weights give, for processors that multiply int8 faster. ``sites``: those whose linears are ``modules``, by name."""

    def __init__(self, sites: Sequence[Site], weights: Mapping[str, Weight | Tensor]) -> None:
        self.sites: list[Site] = []
        self.modules: dict[str, Callable[[Tensor], Tensor]] = {}
        for site in sites:
            names = [x.name for x in site.linears]
            found = {n: w for n in names if isinstance(w := weights[n], ChannelInt8)}
            if len(found) == len(names):
                self.sites.append(site)
                self.modules |= {n: partial(self._run, w, weights.get(f"{n}.bias")) for n, w in found.items()}
        self._read: tuple[Tensor, Tensor, Tensor] | None = None

    def _run(self, weight: ChannelInt8, bias: Any, x: Tensor) -> Tensor:
        if self._read is None or self._read[0] is not x:  # several linears read one input, one after the other
            codes, scale = token_codes(x.reshape(-1, x.shape[-1]), torch.int8)
            self._read = x, codes.to(torch.int8), scale
        y = int8_product(self._read[1], weight.weight).mul_(self._read[2]).mul_(weight.scales)
        return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], -1)
