"""A linear on the device of the tensor runner, in float32: what joins what a draft reads of its model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.models.spec import LinearSpec
from toolkit.runners.drafts.head import F32


class TensorJoin:
    """``matrix``: [out, in]."""

    def __init__(self, matrix: Tensor, device: str, bias: Tensor | None = None) -> None:
        self._matrix, self._device = matrix.to(device, torch.float32), device
        self._bias = None if bias is None else bias.to(device, torch.float32)

    @torch.inference_mode()
    def __call__(self, x: F32) -> F32:
        """[rows, in] → [rows, out]."""
        found: F32 = F.linear(torch.from_numpy(x).to(self._device), self._matrix, self._bias).cpu().numpy()
        return found


def join_bytes(join: LinearSpec) -> int:
    """Of one."""
    return 4 * join.in_features * join.out_features
