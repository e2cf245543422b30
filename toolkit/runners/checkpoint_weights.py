"""Canonical weights of an open checkpoint, read one stored module at a time, when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight
    from toolkit.artifacts.checkpoint import Checkpoint
    from toolkit.artifacts.outline import Outlines
    from toolkit.models.spec import StoredTensor


class CheckpointWeights(Mapping[str, "Weight | Tensor"]):
    """What ``canonical_weights`` gives, without holding it all: only the module last read is kept.

    So a quantized checkpoint whose codes take a byte each in canonical form never stands in memory as a whole. The
    scales of a float8 KV cache (…k_scale, …v_scale), which no spec names, are found but not listed.
    """

    def __init__(self, checkpoint: Checkpoint, stored: Sequence[StoredTensor]) -> None:
        self._checkpoint = checkpoint
        self._modules: dict[str, StoredTensor] = {}
        for item in stored:
            if item.optional and not {item.name, item.weight_name} & set(checkpoint.names()):
                continue
            for part in item.parts:
                self._modules[part.name] = item
                if item.bias:
                    self._modules[f"{part.name}.bias"] = item
        self._outlines: Outlines | None = None
        self._scales: dict[str, Tensor] | None = None
        self._last: StoredTensor | None = None
        self._loaded: dict[str, Weight | Tensor] = {}

    def __getitem__(self, name: str) -> Weight | Tensor:
        from toolkit.artifacts.weights import CACHE_SCALES, cache_scales, load_stored, split_parts

        if name.endswith(CACHE_SCALES):
            if self._scales is None:
                self._scales = dict(cache_scales(self._checkpoint, self._modules.values()))
            return self._scales[name]
        item = self._modules[name]
        if item is not self._last:
            self._loaded = dict(split_parts(item, *load_stored(self._checkpoint, item)))
            self._last = item
        return self._loaded[name]

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as headers tell it: its form, shapes and dtypes, without memory."""
        from toolkit.artifacts.outline import Outlines
        from toolkit.artifacts.weights import CACHE_SCALES

        if name.endswith(CACHE_SCALES):
            return self[name]
        if self._outlines is None:
            self._outlines = Outlines(self._checkpoint)
        return self._outlines.of(self._modules[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)
