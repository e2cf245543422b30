"""What a model's layers make of text, in torch, layer by layer: what others are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.quant.layers.layerwise import Flow
from toolkit.quant.layers.source import LayerSource

CPU = torch.device("cpu")


@torch.inference_mode()
def hidden_states(source: LayerSource, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Float32 [samples, length, len(layers), hidden], of ``ids`` [samples, length]: what goes into each of ``layers``
    (their number: out of the last)."""
    flow = Flow(source, ids, source.outer_weights(CPU)[source.spec.embed], CPU, len(ids))
    found = {}
    for i, layer in enumerate(source.spec.layers):
        found[i] = torch.cat([*flow.hidden]).float()
        flow.advance(i, layer, source.layer(i, CPU))
    found[len(source.spec.layers)] = torch.cat([*flow.hidden]).float()
    return torch.stack([found[i] for i in layers], 2)
