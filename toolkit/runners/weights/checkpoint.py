"""Canonical weights of an open checkpoint, read one stored module at a time, when asked for."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from toolkit.base.named import Named

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight
    from toolkit.artifacts.checkpoint import Checkpoint
    from toolkit.artifacts.outline import Outlines
    from toolkit.artifacts.scales import AllScales
    from toolkit.models.spec import DecoderSpec, StoredTensor

MOST = 512 << 20  # bytes of a layer that is kept as a whole


class CheckpointWeights(Named["Weight | Tensor"]):
    """What ``canonical_weights`` gives, without holding it all: only the module last read is kept.

    So a quantized checkpoint whose codes take a byte each in canonical form never stands in memory as a whole. The
    scales of a float8 KV cache (…k_scale, …v_scale), which no spec names, are found but not listed.

    ``by_layer``: the model, of a reader that goes over a layer more than once. Its layers, if none has more than
    ``MOST`` bytes, are read as a whole then, and kept until another is asked for.
    """

    def __init__(
        self, checkpoint: Checkpoint, stored: Sequence[StoredTensor], by_layer: DecoderSpec | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._in_order = True
        self._modules: dict[str, StoredTensor] = {}
        super().__init__(self._modules)
        for item in stored:
            if item.optional and not {item.name, item.weight_name} & set(checkpoint.names()):
                continue
            for part in item.parts:
                self._modules[part.name] = item
                if item.bias:
                    self._modules[f"{part.name}.bias"] = item
        self._batches = {id(item): [item] for item in self._modules.values()}
        if by_layer is not None:
            layers = self._layers(by_layer)
            self._in_order = all(self._bytes(items) <= MOST for items in layers) and checkpoint.gguf is None
            if self._in_order:
                self._batches |= {id(item): items for items in layers for item in items}
        self._outlines: Outlines | None = None
        self._scales: dict[str, Tensor] | None = None
        self._last: list[StoredTensor] = []
        self._loaded: dict[str, Weight | Tensor] = {}

    def __getitem__(self, name: str) -> Weight | Tensor:
        from toolkit.artifacts.weights import CACHE_SCALES, cache_scales, load_stored, split_parts

        if name.endswith(CACHE_SCALES):
            if self._scales is None:
                self._scales = dict(cache_scales(self._checkpoint, self._modules.values()))
            return self._scales[name]
        batch = self._batches[id(self._modules[name])]
        if batch is not self._last:
            self._last, self._loaded = batch, {}
            for item in batch:
                self._loaded |= dict(split_parts(item, *load_stored(self._checkpoint, item)))
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

    def reading_ahead(self, names: Container[str]) -> AbstractContextManager[None]:
        """While those called ``names`` are asked for, best once and in their order, the next ones are read, if they
        are not in the system's memory."""
        from toolkit.artifacts.weights import tensor_names

        if not self._in_order or self._checkpoint.is_cached():
            return nullcontext()
        batches = {
            id(batch): batch for name in self for batch in [self._batches[id(self._modules[name])]] if name in names
        }
        wanted = (item for batch in batches.values() for item in batch)
        return self._checkpoint.reading_ahead(tensor_names(self._checkpoint, wanted))

    def scales(self) -> AllScales | None:
        """Those that lie beside the checkpoint."""
        from toolkit.artifacts.scales import read_scales

        return read_scales(self._checkpoint.path)

    def _layers(self, spec: DecoderSpec) -> list[list[StoredTensor]]:
        layers = enumerate(spec.layers)
        layer_of = {name: i for i, x in layers for name in (*(m.name for m in x.linears()), *x.vectors())}
        found: list[dict[int, StoredTensor]] = [{} for _ in spec.layers]
        for item in self._modules.values():
            if item.parts[0].name in layer_of:
                found[layer_of[item.parts[0].name]][id(item)] = item
        return [list(items.values()) for items in found]

    def _bytes(self, items: Sequence[StoredTensor]) -> int:
        held = (name for item in items for name in (item.weight_name, item.bias_name) if name in self._checkpoint)
        return sum(self._checkpoint.info(name).nbytes for name in held)
