"""The one form in memory that every weight format is read into and every packer starts from.

A format on disk (AWQ, GPTQ, GGUF, W8A8 …) is one reader, and where we produce it one writer, to the
classes below; a runner's packing is one packer from them. All tensors live on the CPU; ``out`` is the
number of output features (rows), ``in`` the number of input features. Weights act as ``y = x @ W.T``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """Plain floating point weight. ``weight``: [out, in], float32 / float16 / bfloat16."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype)

    def take_rows(self, rows: Tensor | slice) -> Dense:
        return Dense(self.weight[rows])


@dataclass(frozen=True)
class GroupInt:
    """Integers in groups along the input dimension, one scale (and offset) a group.

    ``codes``: uint8 [out, in], each below ``2**bits``, one code a byte.
    ``scales``: [out, in/group_size], float16, bfloat16 or float32, exactly as stored on disk.
    ``zeros``: uint8 [out, in/group_size] or None; ``minima``: [out, in/group_size] float or None.
        w = (code - zero) * scale     with ``zeros``
        w = code * scale + minimum    with ``minima`` (GGUF Q4_1 and kin)
    Exactly one of the two is given; a symmetric grid is ``zeros`` filled with ``2**(bits-1)``.
    ``group_index``: int32 [in] or None: the group of every input feature where groups are not
    consecutive (GPTQ act-order).
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    minima: Tensor | None = None
    group_index: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def symmetric(self) -> bool:
        return self.zeros is not None and bool((self.zeros == 1 << (self.bits - 1)).all())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.group_index is not None:
            index = self.group_index.long()
            scale = self.scales.float()[:, index]
            if self.minima is not None:
                return (self.codes.float() * scale + self.minima.float()[:, index]).to(dtype)
            assert self.zeros is not None
            return ((self.codes.float() - self.zeros.float()[:, index]) * scale).to(dtype)
        out, n_in = self.codes.shape
        codes = self.codes.view(out, -1, self.group_size).float()
        scale = self.scales.float()[..., None]
        if self.minima is not None:
            w = codes * scale + self.minima.float()[..., None]
        else:
            assert self.zeros is not None
            w = (codes - self.zeros.float()[..., None]) * scale
        return w.view(out, n_in).to(dtype)

    def take_rows(self, rows: Tensor | slice) -> GroupInt:
        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
            minima=None if self.minima is None else self.minima[rows],
        )


@dataclass(frozen=True)
class ChannelInt8:
    """W8A8: int8 weight with one float32 scale a row; activations are quantized per token at run time.

    ``weight``: int8 [out, in]; ``scales``: float32 [out]. w = weight * scale.
    """

    weight: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.weight.float() * self.scales[:, None]).to(dtype)

    def take_rows(self, rows: Tensor | slice) -> ChannelInt8:
        return ChannelInt8(self.weight[rows], self.scales[rows])


@dataclass(frozen=True)
class Fp8:
    """W8A8 in floating point: float8_e4m3fn or float8_e5m2 [out, in], float32 scales [out] (multiply)."""

    weight: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.weight.float() * self.scales[:, None]).to(dtype)

    def take_rows(self, rows: Tensor | slice) -> Fp8:
        return Fp8(self.weight[rows], self.scales[rows])


Weight = Dense | GroupInt | ChannelInt8 | Fp8
