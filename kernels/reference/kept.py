"""What is left of a distribution to draw from."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_mass(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float64 [N, V]: the running sum, in ascending order of ids, of the mass that ``sample`` keeps of each row."""
    greedy = temperature == 0
    below = logits - logits.amax(-1, keepdim=True)  # the best stays 0 however small the temperature
    scaled = below / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    ordered, ids = scaled.softmax(-1).double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=logits.device)
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    mass = (ordered * keep).cumsum(-1)
    keep &= (mass - ordered < top_p.double()[:, None] * mass[:, -1:]) | (top_p >= 1)[:, None]
    keep &= ordered >= min_p.double()[:, None] * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(ordered).scatter_(1, ids, ordered * keep).cumsum(-1)
