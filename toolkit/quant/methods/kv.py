"""Scales for a KV cache in float8: the largest key and value of every layer on calibration text.

Written the way other engines read them: ``…self_attn.k_scale`` and ``v_scale`` (float32 [1], multiplied by the stored
number) beside dense weights, and ``kv_cache_scheme`` in config.json's ``quantization_config``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.formats.ct_scheme import CACHE_SCHEME, cache_config
from toolkit.artifacts.manifest import describe_parent
from toolkit.artifacts.output.checkpoint_writer import write_checkpoint
from toolkit.artifacts.output.replace import check_directory_target
from toolkit.artifacts.output.room import check_room
from toolkit.artifacts.output.stage import Stage, open_stage
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weights import as_stored, cache_scale_names, load_stored
from toolkit.errors import ToolkitError
from toolkit.measure.text import heldout_text
from toolkit.quant.layers.forward_attention import KEYS, VALUES
from toolkit.quant.layers.layerwise import Flow
from toolkit.quant.layers.masked import as_met
from toolkit.quant.layers.output import cast_to, stored_as
from toolkit.quant.layers.probe import Probe
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.opening import check_alone, open_source, read_text, store_dtype
from toolkit.quant.options import Common
from toolkit.quant.room import dense_bytes
from toolkit.quant.run import Progress, Result, spill_of, tell_plan
from toolkit.runners.tensor.devices.find import find_device

FP8_MAX = 448.0
MIN_SCALE = 1e-6


@torch.inference_mode()
def kv(
    model: str,
    work_dir: Path | str,
    *,
    common: Common = Common(),
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Find the scales of a float8 KV cache and write MODEL with them into ``work_dir``; weights stay dense.

    Raises UsageError or ToolkitError, one line.
    """
    check_alone(common, "lite kv")
    source = open_source(model, common, "kv")
    if not source.spec.keeps_keys():
        raise ToolkitError(
            f"{source.path}: lite kv finds scales of keys and values, of which this model keeps none; "
            "--quant-policy 8 or 16 needs none"
        )
    device, dtype, text = find_device(common.device), store_dtype(common.dtype, source), read_text(source, common)
    tell_plan(source, common, text.plan, eval_tokens=common.measured)
    check_directory_target(work_dir, [source.path], common.overwrite)
    check_room(work_dir, dense_bytes(source, dtype), common.overwrite)
    parent = describe_parent(source.path)
    options = text.options() | {
        "batch_size": common.batch_size, "dtype": str(dtype).removeprefix("torch."), "device": device.type,
        "eval_tokens": common.measured,
    }  # fmt: skip
    with open_stage(
        work_dir, kind="quantized", stage="lite kv", parent=parent, options=options, overwrite=common.overwrite
    ) as stage:
        if (found := stage.earlier) is not None:
            return Result(Path(work_dir), options, found.quality, True)
        source.check_finite()
        tokenizer = Tokenizer.open(source.checkpoint.tokenizer_dir)
        ids = as_met(source.spec, text.read(stage, tokenizer, parent["digest"], progress))
        heldout = torch.tensor(tokenizer.encode(heldout_text(common.measured))[: common.measured])
        source.check_tokens(heldout)
        table = source.outer_weights(device)[source.spec.embed]
        with spill_of(stage, common) as spill:
            probe = Probe(source.spec, table, heldout, device, spill, source.added, source.given)
            flow = Flow(source, ids, table, device, common.batch_size, spill)
            scales = _scales(source, stage, flow, probe, device, progress)
            progress("measuring perplexity", 0, 1)
            quality = probe.figures(source.outer_weights(device))
        progress("writing", 0, 1)
        _write(source, stage, scales, dtype)
        size = sum(f.stat().st_size for f in stage.dir.glob("*.safetensors"))
        bits = 8 * torch.empty(0, dtype=dtype).element_size()
        quality |= {"layers": [], "bits_per_weight": float(bits), "size_bytes": size}
        stage.finish(quality)
    return Result(Path(work_dir), options, quality, False)


def _scales(
    source: LayerSource, stage: Stage, flow: Flow, probe: Probe, device: torch.device, progress: Progress
) -> dict[str, Tensor]:
    """``k_scale`` and ``v_scale`` of every layer by the names that they are stored under, float32 [1]."""
    found: dict[str, Tensor] = {}
    layers = source.spec.layers
    last = max((i for i in range(len(layers)) if not stage.done(f"layer.{i}")), default=-1)
    for i, layer in enumerate(layers):
        progress("reading keys and values", i, len(layers))
        weights = source.layer(i, device)
        largest: dict[str, Tensor] = {}

        def observe(name: str, x: Tensor, largest: dict[str, Tensor] = largest) -> None:
            if name.endswith((KEYS, VALUES)):
                now = x.abs().amax().float()
                largest[name] = torch.maximum(largest.get(name, now), now)

        if i <= last:
            flow.advance(i, layer, weights, observe)
        if not stage.done(f"layer.{i}"):
            scales = {name: (x.cpu() / FP8_MAX).clamp(min=MIN_SCALE).view(1) for name, x in largest.items()}
            stage.save(f"layer.{i}", scales)
        scales = dict(stage.load(f"layer.{i}"))
        near = {name: scale.to(device) for name, scale in scales.items()}

        def rounding(name: str, x: Tensor, near: dict[str, Tensor] = near) -> Tensor:
            return _round(x, near[name]) if name in near else x

        probe.advance(i, layer, weights, weights, rounding)
        spelled = cache_scale_names(source.stored[i])
        for a in (sub.mixer for sub in layer.sublayers if sub.mixer.kind == "attention"):
            base = a.k.name.rsplit(".", 1)[0]
            found[spelled[f"{base}.k_scale"]] = scales[a.k.name + KEYS]
            found[spelled[f"{base}.v_scale"]] = scales[a.v.name + VALUES]
    progress("reading keys and values", len(layers), len(layers))
    return found


def _round(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _write(source: LayerSource, stage: Stage, scales: dict[str, Tensor], dtype: torch.dtype) -> None:
    def config(kept: dict[str, Any]) -> dict[str, Any]:
        return stored_as(kept, dtype) | {"quantization_config": cache_config(CACHE_SCHEME)}

    write_checkpoint(stage.dir, source.checkpoint, _tensors(source, scales, dtype), config)


def _tensors(source: LayerSource, scales: dict[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for item in source.present:
        value, bias = load_stored(source.checkpoint, item)
        dense = value if isinstance(value, Tensor) else value.dequantize()
        for name, tensor in as_stored(item, dense, bias):
            yield name, cast_to(tensor, dtype, item.name)
        del dense
        del value, bias
        source.checkpoint.release()
    yield from scales.items()
