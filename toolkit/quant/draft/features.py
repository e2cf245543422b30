"""What a model's layers make of text, as a head is given it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.quant.layers.layerwise import Flow
from toolkit.quant.layers.source import LayerSource


@torch.inference_mode()
def features(
    source: LayerSource,
    ids: Tensor,
    layers: tuple[int, ...],
    device: torch.device,
    batch_size: int,
    progress: Callable[[int], None],
) -> Tensor:
    """Hidden states, bfloat16 [samples, length, len(layers) + 1, hidden], of ``ids`` [samples, length]: what goes into
    each of ``layers`` (their number: out of the last), and what the last layer gives. ``progress``: told how many
    layers are behind.

    Raises ToolkitError that names the layer where they are not finite.
    """
    spec = source.spec
    flow = Flow(source, ids, source.outer_weights(device)[spec.embed], device, batch_size)
    found = torch.empty(*ids.shape, len(layers) + 1, spec.hidden_size, dtype=torch.bfloat16)

    def keep(place: int) -> None:
        at = 0
        for batch in flow.hidden:
            found[at : at + len(batch), :, place] = batch.to(torch.bfloat16)
            at += len(batch)

    for i, layer in enumerate(spec.layers):
        if i in layers:
            keep(layers.index(i))
        flow.advance(i, layer, source.layer(i, device))
        progress(i + 1)
    if len(spec.layers) in layers:
        keep(layers.index(len(spec.layers)))
    keep(len(layers))
    return found
