"""Any method, layer by layer: statistics in, quantized layer out, saved so that a killed run goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.artifacts.stage import Stage
from toolkit.errors import ToolkitError
from toolkit.models.spec import LayerSpec
from toolkit.quant.activations import input_rounding
from toolkit.quant.forward import Observer, Rounding, Weights, embed, layer_forward, rms_norm
from toolkit.quant.layers import LayerSource
from toolkit.quant.probe import Probe
from toolkit.quant.result import LayerResult, LinearReport, Method, from_state, to_state, with_dead_inputs
from toolkit.quant.selection import Selection, head_site
from toolkit.quant.spill import Spill, Tensors
from toolkit.quant.statistics import Gram, Statistics, usable

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in all)."""
HEAD = "head"  # the stage's key of a quantized head; layers are "layer.N"


@dataclass(frozen=True)
class Setting:
    """How layers are gone through. ``sequential``: statistics are of the inputs that the quantized layers before give,
    not of the original model's. ``saved``: statistics taken earlier, by layer; then no text is read."""

    method: Method
    selection: Selection
    device: torch.device
    batch_size: int = 8
    sequential: bool = False
    saved: Callable[[int], dict[str, Gram]] | None = None


class Flow:
    """Calibration text on its way through the layers. ``token_ids`` [samples, length]; ``table``: the embedding;
    ``spill``: where it is kept between them (None: in memory)."""

    def __init__(
        self,
        source: LayerSource,
        token_ids: Tensor,
        table: Tensor,
        device: torch.device,
        batch_size: int,
        spill: Spill | None = None,
    ) -> None:
        self.source, self.device = source, device
        batches = token_ids.split(batch_size) if len(token_ids) else ()
        self.hidden = Tensors((embed(source.spec, table, b.to(table.device)).cpu() for b in batches), spill)

    def look(self, index: int, layer: LayerSpec, weights: Weights) -> dict[str, Gram]:
        """Statistics of the layer's inputs; the text stays before the layer."""
        statistics = Statistics()
        for x in self.hidden:
            self._check(index, layer_forward(layer, weights, x.to(self.device), statistics.observe))
        return statistics.finish()

    def advance(
        self,
        index: int,
        layer: LayerSpec,
        weights: Weights,
        observe: Observer | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        """Take the text through the layer. Raises ToolkitError that names the layer where it is no longer finite."""
        for j, x in enumerate(self.hidden):
            y = layer_forward(layer, weights, x.to(self.device), observe, rounding)
            self.hidden[j] = self._check(index, y).cpu()

    def head_statistics(self, outer: Weights) -> dict[str, Gram]:
        """Statistics of the head's input, the text being behind all layers. ``outer`` holds the final norm."""
        spec, statistics = self.source.spec, Statistics()
        for x in self.hidden:
            normed = rms_norm(spec.final_norm, outer, x.to(self.device))
            statistics.observe(spec.head, normed.reshape(-1, spec.hidden_size))
        return statistics.finish()

    def through(self) -> None:
        """Take the text through all of the original layers."""
        for i, layer in enumerate(self.source.spec.layers):
            self.advance(i, layer, self.source.layer(i, self.device))

    def _check(self, index: int, y: Tensor) -> Tensor:
        if not bool(torch.isfinite(y).all()):
            raise ToolkitError(
                f"{self.source.path}: activations of layer {index} are not finite; nothing to calibrate on"
            )
        return y


def quantize_layers(
    source: LayerSource, setting: Setting, flow: Flow, probe: Probe | None, stage: Stage, progress: Progress
) -> list[LinearReport]:
    """Quantize every layer and save each under ``layer.N`` in ``stage``, the head under ``head``; ``probe`` goes along,
    if there is one.

    Unless ``setting.sequential``, statistics are taken in the unquantized model, so a layer's result depends on no
    other's. Layers that ``stage`` holds already are not quantized again, only passed through. Raises ToolkitError
    where activations are not finite, naming the layer.
    """
    layers = source.spec.layers
    keys = [f"layer.{i}" for i in range(len(layers))] + ([HEAD] if setting.selection.head else [])
    missing = {i for i, key in enumerate(keys) if not stage.done(key)}
    last_missing = max(missing, default=-1) if setting.saved is None else -1
    reports: list[LinearReport] = []
    for i, layer in enumerate(layers):
        progress(i, len(keys))
        original = source.layer(i, setting.device)
        sites = setting.selection.sites(layer)
        grams: dict[str, Gram] = {}
        if setting.sequential and i in missing:
            grams = flow.look(i, layer, original)
        elif i <= last_missing and not setting.sequential:
            statistics = Statistics()
            flow.advance(i, layer, original, statistics.observe if i in missing else None)
            grams = statistics.finish()
        if i in missing:
            grams = grams if setting.saved is None else setting.saved(i)
            _check_finite(source, i, grams)
            result = setting.method(sites, original, usable(grams))
            stage.save(keys[i], *to_state(with_dead_inputs(result, sites, grams)))
        result = _load(stage, keys[i])
        reports += result.reports
        if probe is None and not setting.sequential:
            continue
        after, rounding = _on(result, setting.device), input_rounding(sites, result.weights)
        if setting.sequential and i < last_missing:  # past the last one to quantize nobody reads the text
            flow.advance(i, layer, after, rounding=rounding)
        if probe is not None:
            probe.advance(layer, original, after, rounding)
    if setting.selection.head:
        progress(len(layers), len(keys))
        if len(layers) in missing:
            stage.save(HEAD, *to_state(_quantize_head(source, setting, flow)))
        reports += _load(stage, HEAD).reports
    progress(len(keys), len(keys))
    return reports


def probe_layers(source: LayerSource, setting: Setting, probe: Probe, stage: Stage, progress: Progress) -> None:
    """Send ``probe`` through all layers as ``stage`` holds them now."""
    count = len(source.spec.layers)
    for i, layer in enumerate(source.spec.layers):
        progress(i, count)
        result = load_layer(stage, i)
        rounding = input_rounding(setting.selection.sites(layer), result.weights)
        probe.advance(layer, source.layer(i, setting.device), _on(result, setting.device), rounding)
    progress(count, count)


def _quantize_head(source: LayerSource, setting: Setting, flow: Flow) -> LayerResult:
    spec, outer = source.spec, source.outer_weights(setting.device)
    grams = flow.head_statistics(outer) if setting.saved is None else setting.saved(len(spec.layers))
    weights = {name: outer[name].float() for name in (spec.head, f"{spec.head}.bias") if name in outer}
    site = head_site(source)
    return with_dead_inputs(setting.method([site], weights, usable(grams)), [site], grams)


def _check_finite(source: LayerSource, index: int, grams: Mapping[str, Gram]) -> None:
    """Inputs can be finite whose squares are not."""
    for name, gram in grams.items():
        if not bool(torch.isfinite(gram.xtx).all()):
            raise ToolkitError(
                f"{source.path}: activations of layer {index} overflow at {name}; nothing to calibrate on"
            )


def _load(stage: Stage, key: str) -> LayerResult:
    return from_state(stage.load(key), stage.load_meta(key))


def load_layer(stage: Stage, index: int) -> LayerResult:
    """The saved result of a layer."""
    return _load(stage, f"layer.{index}")


def replace_layer(stage: Stage, index: int, result: LayerResult) -> None:
    """Save ``result`` in place of what the layer was."""
    stage.save(f"layer.{index}", *to_state(result))


def load_head(stage: Stage) -> LayerResult | None:
    """The saved result of the head, None where it stays as it is."""
    return _load(stage, HEAD) if stage.done(HEAD) else None


def saved_layers(stage: Stage, count: int) -> Iterator[LayerResult]:
    for i in range(count):
        yield load_layer(stage, i)


def _on(result: LayerResult, device: torch.device) -> Weights:
    return {name: value.to(device) for name, value in result.dense().items()}
