"""Texts for models that guess blocks of tokens: they meet their own answers half done, and so the texts here."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.models.spec import DecoderSpec


def as_met(spec: DecoderSpec, ids: Tensor) -> Tensor:
    """Token ids [..., length] as the model meets them: where it has a mask token, that in place of every second one."""
    if spec.mask_token is None:
        return ids
    hidden = torch.arange(ids.shape[-1], device=ids.device) % 2 == 1
    return ids.masked_fill(hidden, spec.mask_token)


def scored(spec: DecoderSpec, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(places, the token that the logits there are about) of a text ``ids`` [length] given ``as_met``."""
    if spec.mask_token is None:
        return torch.arange(len(ids) - 1), ids[1:]
    places = torch.arange(1, len(ids), 2)
    return places, ids[places]
