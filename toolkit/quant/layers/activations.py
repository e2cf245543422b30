"""What 8-bit activations lose: the inputs of W8A8 and fp8 linears rounded as runners round them, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp8, Weight
from toolkit.kernels.torch.product import int8_product
from toolkit.models.sites import Site
from toolkit.quant.layers.lazy import Lazy

EPS = 1e-7  # smallest scale, as LMDeploy's kernels have it


def round_tokens(x: Tensor, dtype: torch.dtype, group: int | None = None) -> Tensor:
    """``x`` [tokens, channels] as it comes back from int8 or float8 with a scale a token (and ``group`` channels)."""
    parts = x if group is None else torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    codes, scale = row_codes(parts, dtype)
    back = codes.to(x.dtype) * scale
    return back if group is None else back.flatten(1)[:, : x.shape[1]]


def row_codes(x: Tensor, dtype: torch.dtype, least: float = EPS) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` [..., n], those of int8 still in its float type, and their scales [..., 1], at least ``least``."""
    top = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))  # abs() would copy all of a weight
    scale = (largest / top).clamp_(min=least)
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
    weights give, for processors that multiply int8 faster. ``sites``: those whose linears, ``names``, are all W8A8.
    ``room`` bytes of codes are kept in memory, the rest is read each time."""

    def __init__(self, sites: Sequence[Site], weights: Mapping[str, Weight | Tensor], room: int) -> None:
        self.sites: list[Site] = []
        self._scales: dict[str, Tensor] = {}
        for site in sites:  # codes, which can be many, are let go again
            scales = {x.name: w.scales for x in site.linears if isinstance(w := weights[x.name], ChannelInt8)}
            if len(scales) == len(site.linears):
                self.sites.append(site)
                self._scales |= scales
        self.names = list(self._scales)
        biases = {name: weights.get(f"{name}.bias") for name in self.names}
        self._biases = {name: b for name, b in biases.items() if isinstance(b, Tensor)}
        self._codes = Lazy(self.names, lambda name: _int8(weights, name).weight, room)
        self._read: tuple[Tensor, Tensor, Tensor] | None = None

    def run(self, name: str, x: Tensor) -> Tensor:
        """``x`` [..., in], not rounded yet, through linear ``name``: float32 [..., out]."""
        if self._read is None or self._read[0] is not x:  # several linears read one input, one after the other
            codes, scale = row_codes(x.reshape(-1, x.shape[-1]).float(), torch.int8)
            self._read = x, codes.to(torch.int8), scale
        y = int8_product(self._read[1], self._codes[name]).mul_(self._read[2]).mul_(self._scales[name])
        bias = self._biases.get(name)
        return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], -1)


def _int8(weights: Mapping[str, Weight | Tensor], name: str) -> ChannelInt8:
    found = weights[name]
    assert isinstance(found, ChannelInt8)
    return found
