"""What the error of one part of a model does to its predictions.

For every part that is rounded by itself, a copy of a little text goes on through the original layers behind it. The KL
divergence of its predictions from the original's is that part's loss; small losses of several parts add up. All copies
pass a layer together, so each layer is read once.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from toolkit.artifacts.safetensors_file import write_tensors
from toolkit.artifacts.tensor_file import TensorFile
from toolkit.measure.predictions import kl_divergence
from toolkit.models.spec import DecoderSpec, LayerSpec
from toolkit.quant.layers.forward import head_logits, layer_forward
from toolkit.quant.layers.forward_parts import Weights
from toolkit.quant.layers.spill import Spill, Tensors

SAMPLES = 2  # of the text that go along in every copy
ROWS, LOGITS = 256, 1 << 24  # positions whose logits are held at once; logits held at once


class Copies:
    """Hidden states [samples, length, hidden] of the text with one part rounded, by the part's name.

    ``directory``: where copies are kept as they were when they began, for a run that goes on; ``spill``: where those
    are held that go along, two for every layer of the model so far.
    """

    def __init__(self, directory: Path, device: torch.device, spill: Spill) -> None:
        self.directory, self.device, self.spill = directory, device, spill
        self._states: dict[str, Tensors] = {}

    def begin(self, index: int, states: dict[str, Tensor]) -> None:
        """Take in copies that begin behind layer ``index``."""
        write_tensors(self._file(index), dict(states), {})
        self._hold(states)

    def resume(self, index: int) -> None:
        """The copies that an earlier run began behind layer ``index``."""
        file = TensorFile(self._file(index))
        self._hold({name: file[name].clone() for name in file})

    def advance(self, layer: LayerSpec, weights: Weights) -> None:
        """Send all copies through a layer."""
        for held in self._states.values():
            held[0] = layer_forward(layer, weights, held[0].to(self.device)).cpu()

    def divergence(self, spec: DecoderSpec, outer: Weights, exact: Tensor) -> dict[str, float]:
        """KL(original ‖ copy) in nats a token of every copy, all being behind the last layer. ``outer``: final norm and
        head; ``exact``: the original's hidden states, [samples, length, hidden]."""
        rows = exact.flatten(0, 1)
        lost = dict.fromkeys(self._states, 0.0)
        step = min(ROWS, max(16, LOGITS // spec.vocab_size))
        for a in range(0, len(rows), step):
            p = head_logits(spec, outer, rows[a : a + step].to(self.device)).log_softmax(-1)
            for name, held in self._states.items():
                q = head_logits(spec, outer, held[0].flatten(0, 1)[a : a + step].to(self.device)).log_softmax(-1)
                lost[name] += float(kl_divergence(p, q))
        return {name: total / len(rows) for name, total in lost.items()}

    def _hold(self, states: dict[str, Tensor]) -> None:
        self._states |= {name: Tensors([x], self.spill) for name, x in states.items()}

    def _file(self, index: int) -> Path:
        return self.directory / f"copies.{index}.safetensors"
