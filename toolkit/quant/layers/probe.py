"""Held-out text sent through the layers beside the calibration text: quality before and after at no second load.

Two copies of the hidden states go along, one through the layers as they were, one through the quantized ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.errors import ToolkitError
from toolkit.measure.predictions import Before
from toolkit.measure.windows import scoring_windows
from toolkit.models.spec import DecoderSpec, LayerSpec
from toolkit.quant.layers.along import along
from toolkit.quant.layers.forward import Added, Given, all_finite, embed, head_logits, layer_forward
from toolkit.quant.layers.forward_parts import Rounding, Weights, normed
from toolkit.quant.layers.lazy import KEEP
from toolkit.quant.layers.masked import as_met, scored
from toolkit.quant.layers.spill import Spill, Tensors

WINDOW = 1024
ROWS, LOGITS = 256, 1 << 23  # positions whose logits are held at once; logits held at once


class Probe:
    """``tokens``: held-out token ids [n], cut into the windows that ``tool eval ppl`` has where ``--stride`` equals
    ``--window``: they do not overlap, the last may be shorter, every token but each window's first is scored once. Of a
    model with a mask token those are scored that it stands for (``masked``)."""

    def __init__(
        self,
        spec: DecoderSpec,
        table: Tensor,
        tokens: Tensor,
        device: torch.device,
        spill: Spill | None = None,
        added: Added | None = None,
        given: Given | None = None,
    ) -> None:
        self.spec, self.device = spec, device
        self.window = min(WINDOW, max(spec.max_position, 2))  # a window of one token scores nothing
        cuts = scoring_windows(len(tokens), self.window, self.window)
        self.ids = [tokens[start:stop] for start, stop, _ in cuts]
        met = [as_met(spec, row) for row in self.ids]
        self.before, self.after = (
            Tensors(
                (embed(spec, table, ids[None].to(table.device), None, added, given).cpu() for ids in met),
                spill,
            )
            for _ in range(2)
        )

    def advance(
        self, index: int, layer: LayerSpec, original: Weights, quantized: Weights, rounding: Rounding | None = None
    ) -> None:
        """Send both copies through layer ``index``; ``rounding`` holds for the inputs of the quantized one. Raises
        ToolkitError that names the layer where one is no longer finite."""
        copies = ((self.before, original, None, "as it was"), (self.after, quantized, rounding, "once quantized"))
        for states, weights, near, which in copies:
            for i, x in enumerate(states):
                y = layer_forward(layer, weights, x.to(self.device), rounding=near, along=along(self.spec, index))
                if not all_finite(y):
                    raise ToolkitError(f"held-out text: activations of layer {index}, {which}, are not finite")
                states[i] = y.cpu()

    def figures(self, weights: Weights, quantized: Weights | None = None) -> dict[str, Any]:
        """After the last layer. ``weights``: final norm and head; ``quantized``: those of the second copy, if others.

        Returns ``Before.figures`` and how they were taken.
        """
        if self.spec.encodes:
            return self._likeness(weights)
        found = Before()
        weights = _widened(weights, self.spec.head)
        quantized = None if quantized is None else _widened(quantized, self.spec.head)
        step = min(ROWS, max(16, LOGITS // self.spec.vocab_size))
        for row, before, after in zip(self.ids, self.before, self.after, strict=True):
            for place, targets in zip(*(part.split(step) for part in scored(self.spec, row)), strict=True):
                targets = targets.to(self.device)
                x, y = before[0, place].to(self.device), after[0, place].to(self.device)
                if quantized is None:  # one product, for the head may be widened in it
                    p, q = head_logits(self.spec, weights, torch.cat([x, y])).chunk(2)
                else:
                    p, q = head_logits(self.spec, weights, x), head_logits(self.spec, quantized, y)
                found.add(p, q, targets)
        return found.figures() | {
            "window": self.window,
            "stride": self.window,
            "dtype": "float32",
        }

    def _likeness(self, weights: Weights) -> dict[str, Any]:
        """Of an encoder: cosines of the mean of each window's last hidden states before and after."""
        norm, found = self.spec.final_norm, []
        for before, after in zip(self.before, self.after, strict=True):
            x, y = (normed(norm, weights, states.to(self.device)).mean(1)[0] for states in (before, after))
            found.append(float(torch.cosine_similarity(x, y, 0)))
        figures = {"cosine": sum(found) / len(found), "cosine_least": min(found)}
        return figures | {"tokens": sum(map(len, self.ids)), "window": self.window, "dtype": "float32"}


def _widened(weights: Weights, head: str) -> Weights:
    """``weights`` with the head in float32 where that takes no more than ``KEEP`` bytes: it is used many times."""
    return {**weights, head: weights[head].float()} if 4 * weights[head].numel() <= KEEP else weights
