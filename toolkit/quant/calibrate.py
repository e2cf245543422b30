"""``tool lite calibrate``: the statistics of every input alone, for later runs (``--calibration DIR``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from toolkit.artifacts.manifest import describe_parent
from toolkit.artifacts.output.replace import check_directory_target
from toolkit.artifacts.output.room import check_room
from toolkit.artifacts.output.stage import Stage, open_stage
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.models.sites import layer_sites
from toolkit.quant.layers.layerwise import Flow
from toolkit.quant.layers.masked import as_met
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.spill import Spill
from toolkit.quant.layers.statistics_file import KIND, file_name, planned_bytes, raw_state, write_statistics
from toolkit.quant.opening import open_source, read_text
from toolkit.quant.options import Common
from toolkit.quant.run import Progress, Result, spill_of, tell_plan
from toolkit.runners.tensor.devices.find import find_device


@torch.inference_mode()
def calibrate(
    model: str,
    work_dir: Path | str,
    *,
    common: Common = Common(),
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Write XᵀX, Σ|x|, max|x| and a sample of every input of MODEL's linears to ``work_dir``, a file a layer.

    Raises UsageError or ToolkitError.
    """
    source = open_source(model, common, "calibrate")
    check_directory_target(work_dir, [source.path], common.overwrite)
    size = planned_bytes(source)
    common.notice(f"statistics: at most {size / 1e9:.2f} GB (twice that while they are taken)")
    check_room(work_dir, 2 * size, common.overwrite)
    device, text = find_device(common.device), read_text(source, common)
    tell_plan(source, common, text.plan, eval_tokens=0)
    parent = describe_parent(source.path)
    options = text.options() | {"batch_size": common.batch_size, "device": device.type}
    with open_stage(
        work_dir, kind=KIND, stage="lite calibrate", parent=parent, options=options, overwrite=common.overwrite
    ) as stage:
        if not stage.already_there:
            source.check_finite()
            tokenizer = Tokenizer.open(source.checkpoint.tokenizer_dir)
            ids = as_met(source.spec, text.read(stage, tokenizer, parent["digest"], progress))
            with spill_of(stage, common) as spill:
                _collect(source, stage, ids, device, common, spill, progress)
            stage.finish()
        return Result(Path(work_dir), options, {}, stage.already_there)


def _collect(
    source: LayerSource,
    stage: Stage,
    ids: torch.Tensor,
    device: torch.device,
    common: Common,
    spill: Spill,
    progress: Progress,
) -> None:
    """Statistics of every layer, each kept in the stage as soon as it is known, then all written out."""
    spec = source.spec
    flow = Flow(source, ids, source.outer_weights(device)[spec.embed], device, common.batch_size, spill)
    count = len(spec.layers)
    missing = [i for i in range(count + 1) if not stage.done(_key(i))]
    if common.ray is None:
        _look(source, stage, flow, missing, progress)
    else:
        from toolkit.quant.cluster import Place, statistics

        with closing(statistics(common, Place.of(source), flow.hidden, device, missing)) as found:
            for i in missing:
                progress("taking statistics", i, count)
                stage.save(_key(i), *next(found))
    progress("taking statistics", count, count)
    for i in range(count + 1):
        write_statistics(stage.dir / file_name(i), stage.load(_key(i)), stage.load_meta(_key(i)))


def _look(source: LayerSource, stage: Stage, flow: Flow, missing: Sequence[int], progress: Progress) -> None:
    """Statistics of the layers that are ``missing``, saved; the one after the last is the head's input."""
    count, device, last = len(source.spec.layers), flow.device, max(missing, default=-1)
    for i, layer in enumerate(source.spec.layers[: last + 1]):
        progress("taking statistics", i, count)
        weights, moved = source.layer(i, device), False
        if i in missing:
            sites = layer_sites(layer)
            grams, moved = flow.statistics(i, layer, weights, sites, advance=True)
            stage.save(_key(i), *raw_state((site.name, grams.raw(site.name)) for site in reversed(sites)))
            del grams
        if not moved:
            flow.advance(i, layer, weights)
    if last == count:
        stage.save(_key(count), *raw_state(flow.head_statistics(source.outer_weights(device)).items()))


def _key(index: int) -> str:
    return f"statistics.{index}"
