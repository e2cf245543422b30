"""Embeddings of each layer's own."""

from __future__ import annotations

from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import PerLayerSpec, PerLayerTable
from toolkit.runners.tensor.layers.linear import Activations, Linear
from toolkit.runners.tensor.layers.norms import LayerNorm, Norm
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.step.context import StepContext


@dataclass(frozen=True)
class Given:
    """What layers are given of tokens; see ``PerLayerTable``, of which ``table`` is the matrix."""

    spec: PerLayerTable
    table: Tensor
    projection: Linear
    norm: Norm | LayerNorm
    ops: Ops

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """``x`` [T, hidden], int64 ``ids`` [T] -> [T, columns]."""
        told = (self.projection(x) * self.spec.projection_scale).unflatten(1, (-1, self.spec.norm.size))
        return (
            self.norm(told).flatten(1) + self.ops.embedding(ids, self.table, self.spec.embed_scale)
        ) * self.spec.scale


@dataclass(frozen=True)
class PerLayer:
    spec: PerLayerSpec
    gate: Linear
    down: Linear
    ops: Ops

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        assert step.given is not None, "the model has no table"
        own = step.given.narrow(1, self.spec.at, self.spec.gate.out_features)
        return self.down((self.ops.act(self.gate(x), self.spec.activation) * own).contiguous())
