"""A layer for multi-token prediction or an EAGLE layer on the tensor runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Weight
from toolkit.artifacts.engine.artifact import ENGINE_JSON, TORCH_TARGET, EngineArtifact
from toolkit.artifacts.engine.torch_target import TorchWeights
from toolkit.errors import ToolkitError
from toolkit.models.spec import MtpSpec
from toolkit.runners.drafts.head import F32, Join
from toolkit.runners.drafts.mtp import MtpHead
from toolkit.runners.tensor.cuda_artifact import CudaWeights
from toolkit.runners.tensor.drafts.join import TensorJoin, join_bytes
from toolkit.runners.tensor.drafts.lent import final_norm, options_beside
from toolkit.runners.tensor.runner import TensorRunner


def open_canonical_mtp(artifact: EngineArtifact, device: str) -> TorchWeights:
    """The layer of an artifact that is packed for torch or a GPU. Raises ToolkitError for what is missing."""
    spec = artifact.mtp
    assert spec is not None
    wanted = [*spec.numbers(), *spec.layer.vectors(), *(linear.name for linear in spec.layer.linears())]
    if missing := next((name for name in wanted if name not in artifact.mtp_params), None):
        raise ToolkitError(f"{artifact.path / ENGINE_JSON}: mtp: {missing} is missing; convert the model again")
    part = replace(artifact, spec=spec.layer, params=artifact.mtp_params)
    if artifact.target == TORCH_TARGET:
        return TorchWeights(part)
    return CudaWeights(part, torch.device(device))


class TensorMtp(MtpHead):
    """``weights``: called at every load, canonical, without the model's embedding, head and final norm, which
    ``target`` lends. Its steps run kernel by kernel on the device of ``target``, also where that captures graphs."""

    def __init__(
        self,
        spec: MtpSpec,
        weights: Callable[[], Mapping[str, Weight | Tensor]],
        target: TensorRunner,
        name: str = "mtp",
    ) -> None:
        runner = TensorRunner(spec.layer, weights, options_beside(target), dense=target.dense, lender=target)
        super().__init__(spec, runner, name)
        self._target, self._weights = target, weights

    def read(self) -> tuple[dict[str, F32], Join]:
        spec, found = self.spec, self._weights()
        matrix, bias = found[spec.join.name], found[f"{spec.join.name}.bias"] if spec.join.bias else None
        whole = matrix if isinstance(matrix, Tensor) else matrix.dequantize(torch.float32)
        whole = whole.view(spec.join.out_features, spec.join.in_features)
        assert bias is None or isinstance(bias, Tensor)
        join = TensorJoin(whole, self._target.device, bias)
        norms = {spec.model_norm.name: final_norm(self._target)}
        for norm in spec.norms()[1:]:
            weight = found[norm.name]
            assert isinstance(weight, Tensor), norm.name
            norms[norm.name] = (weight.float() + norm.weight_offset).cpu().numpy()
        return norms, join

    def join_bytes(self) -> int:
        return join_bytes(self.spec.join)
