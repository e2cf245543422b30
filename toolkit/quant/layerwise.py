"""Any method, layer by layer: statistics in, quantized layer out, saved so that a killed run goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from toolkit.artifacts.stage import Stage
from toolkit.errors import ToolkitError
from toolkit.quant.forward import Weights, embed, layer_forward
from toolkit.quant.layers import LayerSource
from toolkit.quant.probe import Probe
from toolkit.quant.result import LayerResult, LinearReport, Method, from_state, to_state
from toolkit.quant.statistics import Statistics

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in all)."""


def quantize_layers(
    source: LayerSource,
    method: Method,
    calibration: Tensor,
    probe: Probe,
    stage: Stage,
    *,
    table: Tensor,
    batch_size: int,
    device: torch.device,
    progress: Progress,
) -> list[LinearReport]:
    """Quantize every layer by ``method`` and save each under ``layer.N`` in ``stage``; ``probe`` goes along.

    ``calibration``: token ids [samples, length]; ``table``: the embedding [vocab, hidden]. Statistics are taken in the
    unquantized model, so a layer's result depends on no other's. Layers that ``stage`` holds already are not quantized
    again, only passed through. Raises ToolkitError where activations are not finite, naming the layer.
    """
    spec = source.spec
    hidden = [embed(spec, table, batch.to(table.device)).cpu() for batch in calibration.split(max(batch_size, 1))]
    reports: list[LinearReport] = []
    count = len(spec.layers)
    missing = [i for i in range(count) if not stage.done(f"layer.{i}")]
    last_missing = max(missing, default=-1)
    for i, layer in enumerate(spec.layers):
        progress(i, count)
        original = source.layer(i, device)
        statistics = Statistics()
        wanted = i in missing
        if i <= last_missing:  # past the last layer to quantize nobody reads the calibration text
            for j, x in enumerate(hidden):
                y = layer_forward(layer, original, x.to(device), statistics.observe if wanted else None)
                if not bool(torch.isfinite(y).all()):
                    raise ToolkitError(
                        f"{source.path}: activations of layer {i} are not finite; nothing to calibrate on"
                    )
                hidden[j] = y.cpu()
        if wanted:
            result = method(layer, original, statistics.finish())
            stage.save(f"layer.{i}", *to_state(result))
        else:
            result = load_layer(stage, i)
        reports += result.reports
        probe.advance(layer, original, _on(result, device))
    progress(count, count)
    return reports


def load_layer(stage: Stage, index: int) -> LayerResult:
    """The saved result of a layer."""
    key = f"layer.{index}"
    return from_state(stage.load(key), stage.load_meta(key))


def saved_layers(stage: Stage, count: int) -> Iterator[LayerResult]:
    for i in range(count):
        yield load_layer(stage, i)


def _on(result: LayerResult, device: torch.device) -> Weights:
    return {name: value.to(device) for name, value in result.dense().items()}
