"""A layer for multi-token prediction or an EAGLE layer on the native runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from toolkit.models.spec import MtpSpec
from toolkit.runners.drafts.head import F32, Join
from toolkit.runners.drafts.mtp import MtpHead
from toolkit.runners.drafts.paged import options_of
from toolkit.runners.native.draft.join import NativeJoin, join_bytes, pack_join, threads_of
from toolkit.runners.native.packing.packed import PackedTensor, floats
from toolkit.runners.native.runner import NativeRunner


class NativeMtp(MtpHead):
    """``weights``: called at every load, packed, without the model's embedding, head and final norm, which ``target``
    lends."""

    def __init__(
        self, spec: MtpSpec, weights: Callable[[], Mapping[str, PackedTensor]], target: NativeRunner, name: str = "mtp"
    ) -> None:
        """Raises UsageError where ``target`` cannot lend."""
        target.lend()
        super().__init__(
            spec, NativeRunner(spec.layer, weights, options_of(target.options), target.dtype, lender=target), name
        )
        self._target, self._weights = target, weights

    def wake(self) -> None:
        if isinstance(self._weights, CheckpointMtp):
            self._weights.load()
        super().wake()

    def release(self) -> None:
        super().release()
        if isinstance(self._weights, CheckpointMtp):
            self._weights.drop()

    def read(self) -> tuple[dict[str, F32], Join]:
        spec, found = self.spec, self._weights()
        shape = spec.join.out_features, spec.join.in_features
        whole = torch.from_numpy(floats(found[spec.join.name]).reshape(shape))
        bias = floats(found[f"{spec.join.name}.bias"]) if spec.join.bias else None
        join = NativeJoin(pack_join(whole, self._target.dtype), threads_of(self._target), bias)
        norms = {norm.name: floats(found[norm.name]) + np.float32(norm.weight_offset) for norm in spec.norms()[1:]}
        return norms | {spec.model_norm.name: floats(self._target.lent()[spec.model_norm.name])}, join

    def join_bytes(self) -> int:
        return join_bytes(self.spec.join, self._target.dtype)


class CheckpointMtp:
    """What ``NativeMtp`` takes, of a checkpoint that is packed in memory: until ``load`` the outlines of it."""

    def __init__(self, spec: MtpSpec, found: Mapping[str, Any]) -> None:
        self._spec, self._found = spec, found
        self._packed: dict[str, PackedTensor] | None = None

    def __call__(self) -> Mapping[str, PackedTensor]:
        from toolkit.runners.native.packing.mtp import pack_mtp
        from toolkit.runners.weights.info import info_of

        if self._packed is not None:
            return self._packed
        return dict(pack_mtp(self._spec, ((name, info_of(self._found, name)) for name in self._found), []))

    def load(self) -> None:
        """From now on they are the weights."""
        from toolkit.runners.native.packing.mtp import pack_mtp

        if self._packed is None:
            made = pack_mtp(self._spec, self._found.items(), [])
            self._packed = {name: tensor.in_memory() for name, tensor in made}

    def drop(self) -> None:
        """Undo ``load``."""
        self._packed = None
