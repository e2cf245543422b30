"""What every ``tool lite`` method runs through: a checkpoint in, its layers one by one, a quantized checkpoint out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.artifacts.canonical import Dense, Weight
from toolkit.artifacts.formats import trellis
from toolkit.artifacts.formats.writers import WRITERS
from toolkit.artifacts.manifest import describe_parent
from toolkit.artifacts.output.replace import check_directory_target
from toolkit.artifacts.output.room import check_room
from toolkit.artifacts.output.stage import Stage, open_stage
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.user_path import user_path
from toolkit.configs.option import show_size
from toolkit.errors import UsageError
from toolkit.measure.text import heldout_text
from toolkit.models.spec import LinearSpec
from toolkit.quant import estimate, gguf
from toolkit.quant.format_choice import choose_format
from toolkit.quant.layers.layerwise import (
    Flow,
    Setting,
    Spread,
    load_head,
    probe_layers,
    quantize_layers,
    saved_layers,
)
from toolkit.quant.layers.masked import as_met
from toolkit.quant.layers.output import write_folded, write_gguf, write_layers
from toolkit.quant.layers.probe import Probe
from toolkit.quant.layers.result import Method, storable_bits
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.spill import Spill
from toolkit.quant.layers.statistics_file import SavedStatistics, open_statistics
from toolkit.quant.methods.guide import AT_ONCE, Guide, choose_samples, stored_bytes
from toolkit.quant.methods.tune import KEY, choose_steps, most_samples, needed, tune
from toolkit.quant.opening import check_alone, check_common, choose, read_text, store_dtype, targets
from toolkit.quant.options import Common
from toolkit.quant.plan import Plan, plan_memory
from toolkit.quant.room import disk_bytes
from toolkit.quant.selection import Selection
from toolkit.quant.text.calibration import CalibrationPlan
from toolkit.quant.text.calibration_text import CalibrationText, Progress
from toolkit.quant.text.selftext import is_written
from toolkit.runners.tensor.devices.find import find_device


@dataclass(frozen=True)
class Result:
    """``quality`` is what the manifest holds under that key; ``options`` as resolved."""

    path: Path
    options: dict[str, Any]
    quality: dict[str, Any]
    already_there: bool


@dataclass(frozen=True)
class Prepared:
    """What ``Recipe.prepare`` gets: token ids [samples, length], a directory that goes with the run's saved state, the
    embedding [vocab, hidden], how the run is done, and where activations are kept."""

    ids: torch.Tensor
    directory: Path
    table: torch.Tensor
    setting: Setting
    progress: Progress
    spill: Spill

    def flow(self, source: LayerSource) -> Flow:
        """The text before the first layer."""
        return Flow(source, self.ids, self.table, self.setting.device, self.setting.batch_size, self.spill)


@dataclass(frozen=True)
class Recipe:
    """What tells one method from another.

    ``method(dtype, directory)``: how sites are quantized, ``dtype`` being what dense tensors are stored as.
    ``sample(out, in)``: a stand-in of the weights it makes, by which ``formats`` (the first is the default) are checked
    beforehand. ``group_size``: see ``write_layers``. ``sequential``, ``carries``, ``products``: see
    ``layerwise.Setting``.
    ``calibrated``: whether the method reads text at all. ``prepare``: what is to be done with the whole model before
    its layers, returning figures for ``quality``. ``guide_samples``: whose gradients guide its rounding, None for the
    preset's. ``tune_steps``: of the tuning afterwards, None for the default where it fits ``--cache-memory``;
    ``few_bits``: so few that tuning brings something behind gradients too; ``eight_bits``: the default is the preset's
    ``tune_steps_8bit``.
    ``whole_layers``: whether ``prepare`` has a layer in memory as a whole; ``texts``: how often it has the text's
    activations; ``beside``: how many samples go through the layers beside the text. ``extra``: fields added to the
    checkpoint's ``quantization_config``. ``round_outer``: in a GGUF file the embedding and head are rounded too
    (``gguf.OUTER``).
    """

    stage: str
    options: dict[str, Any]
    method: Callable[[torch.dtype, Path], Method]
    sample: Callable[[int, int], Weight]
    formats: tuple[str, ...]
    group_size: int | None = None
    sequential: bool = False
    carries: bool = False
    products: bool = True
    calibrated: bool = True
    prepare: Callable[[Prepared], dict[str, Any]] | None = None
    guide_samples: int | None = 0
    tune_steps: int | None = 0
    few_bits: bool = False
    eight_bits: bool = False
    whole_layers: bool = False
    texts: int = 1
    beside: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    round_outer: bool = False


def scratch_of(stage: Stage) -> Path:
    """A directory that goes with the stage's saved state."""
    return stage.partial / "state" / "scratch"


def spill_of(stage: Stage, common: Common) -> Spill:
    """Room for activations beside the stage's output: ``--cache-memory`` in memory, the rest in files."""
    return Spill(stage.partial / "activations", int(common.cache_memory * (1 << 30)))


def tell_plan(
    source: LayerSource,
    common: Common,
    plan: CalibrationPlan | None,
    *,
    eval_tokens: int,
    tune_steps: int = 0,
    whole_layers: bool = False,
    texts: int = 1,
    beside: int = 0,
    products: bool = True,
    carries: bool = False,
    guided: bool = False,
    swept: bool = False,
) -> Plan:
    """Say, and return, how much memory the run will take. ``plan``: of the text, None where none is read; ``texts``,
    ``beside``: see ``Recipe``; the rest as for ``plan_memory``."""
    samples, seqlen = (texts * plan.samples + beside, plan.seqlen) if plan else (0, 0)
    memory = plan_memory(
        source, samples=samples, seqlen=seqlen, batch_size=common.batch_size, eval_tokens=eval_tokens,
        cache_memory=common.cache_memory, tuning=needed(source, seqlen, tune_steps) if tune_steps else 0,
        head=common.quantize_lm_head, whole_layers=whole_layers, products=products, carries=carries,
        guided=guided, swept=swept,
    )  # fmt: skip
    common.notice(memory.line())
    return memory


@torch.inference_mode()
def run(source: LayerSource, work_dir: Path, recipe: Recipe, common: Common, progress: Progress) -> Result:
    """Quantize ``source`` by ``recipe`` into ``work_dir``. Raises UsageError or ToolkitError, one line."""
    check_common(common)
    if recipe.prepare is not None or (recipe.calibrated and common.calibration is None):
        check_alone(common, recipe.stage)
    statistics_dir = [user_path(common.calibration)] if common.calibration else []
    check_directory_target(work_dir, [source.path, *statistics_dir], common.overwrite)
    device, dtype = find_device(common.device), store_dtype(common.dtype, source)
    selection = choose(source, common)
    form = choose_format(common.format, recipe.formats, _stored_linears(source, selection), recipe.sample)
    if form == gguf.FORMAT:
        gguf.check(source, targets(source, selection))
    text = read_text(source, common) if recipe.calibrated and common.calibration is None else None
    plan = text.plan if text else None
    guided, tune_steps = _choose_effort(source, recipe, common, plan, form)
    room = _tell_needs(source, work_dir, recipe, common, plan, selection, dtype, guided, tune_steps)
    check_room(work_dir, room, common.overwrite)
    progress("reading the model", 0, 1)
    parent = describe_parent(source.path)
    statistics = _saved(source, recipe, common, parent["digest"])
    options = recipe.options | (text.options() if text else {})
    options |= {"calibration": statistics.digest} if statistics else {}
    options |= {
        "format": form,
        "batch_size": common.batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "eval_tokens": common.measured,
    }
    options |= {k: list(v) for k, v in (("skip", common.skip), ("include", common.include)) if v}
    options |= {"quantize_lm_head": True} if selection.head else {}
    options |= {"guide_samples": guided} if guided else {}
    options |= {"tune_steps": tune_steps} if tune_steps else {}
    with open_stage(
        work_dir, kind="quantized", stage=recipe.stage, parent=parent, options=options, overwrite=common.overwrite
    ) as stage:
        if (found := stage.earlier) is not None:
            return Result(work_dir, options, found.quality, True)
        method = recipe.method(dtype, scratch_of(stage))
        setting = Setting(
            gguf.with_minima(method) if form == gguf.FORMAT else method, selection, device, common.batch_size,
            sequential=recipe.sequential and statistics is None, carries=recipe.carries and statistics is None,
            products=recipe.products,
            saved=statistics.grams if statistics else None if recipe.calibrated else lambda index: {},
        )  # fmt: skip
        _tell_time(source, stage, setting, recipe, plan, common, parent["digest"], guided, tune_steps)
        spread = _spread(common, source, setting, statistics)
        quality = _quantize(
            source, stage, setting, recipe, text, common, parent["digest"], guided, tune_steps, progress, spread
        )
        progress("writing", 0, 1)
        if form == gguf.FORMAT:
            outer = gguf.outer_matrices(source, selection.head) if recipe.round_outer else []
            quality |= write_gguf(source, stage, dtype, {x.name for x in outer})
            write_folded(source, stage, stage.dir / "model.gguf")
        else:
            write_layers(source, stage, WRITERS[form], dtype, group_size=recipe.group_size, extra=recipe.extra)
            write_folded(source, stage, stage.dir)
        quality |= _size(source, stage, gguf.stored_bits if form == gguf.FORMAT else storable_bits)
        stage.finish(quality)
    return Result(work_dir, options, quality, False)


def _choose_effort(
    source: LayerSource, recipe: Recipe, common: Common, plan: CalibrationPlan | None, form: str
) -> tuple[int, int]:
    """How many samples are to guide the rounding, and for how many steps scales are tuned behind it."""
    effort, room = common.effort, common.cache_memory
    guided = choose_samples(source, recipe.guide_samples, effort.guide_samples, plan, room, common.notice)
    usual = effort.tune_steps if recipe.few_bits or not guided else 0  # else it adds nothing to what gradients bring
    usual = effort.tune_steps_8bit if recipe.eight_bits else usual
    hindrance = "not with --format gguf" if form == gguf.FORMAT else None
    return guided, choose_steps(source, recipe.tune_steps, usual, plan, room, hindrance, common.notice)


def _tell_needs(
    source: LayerSource,
    work_dir: Path,
    recipe: Recipe,
    common: Common,
    plan: CalibrationPlan | None,
    selection: Selection,
    dtype: torch.dtype,
    guided: int,
    tune_steps: int,
) -> int:
    """Say how much memory and disk the run will take; returns the bytes of disk."""
    beside = max(recipe.beside, min(guided, AT_ONCE) * (len(source.spec.layers) + 2))
    memory = tell_plan(
        source, common, plan, eval_tokens=common.measured, tune_steps=tune_steps, whole_layers=recipe.whole_layers,
        texts=recipe.texts, beside=beside, products=recipe.products,
        carries=recipe.carries and common.calibration is None, guided=guided > 0,
        swept=recipe.options.get("sweeps", 0) > 0 or common.format == trellis.METHOD,
    )  # fmt: skip
    gradients = stored_bytes(source.spec.layers) if guided else 0
    room = disk_bytes(source, targets(source, selection), recipe.sample, dtype, memory.disk + gradients)
    common.notice(f"disk: about {show_size(room)} at {work_dir}, while it runs")
    return room


def _tell_time(
    source: LayerSource,
    stage: Stage,
    setting: Setting,
    recipe: Recipe,
    plan: CalibrationPlan | None,
    common: Common,
    digest: str,
    guided: int,
    tune_steps: int,
) -> None:
    """Say how long the run will take, and whether it goes on where an earlier one was."""
    count, there = len(source.spec.layers), stage.saved()
    done = sum(f"layer.{i}" in there for i in range(count))
    if there:
        common.notice(f"going on where an earlier run was: {done} of {count} layers are quantized")
    tokens = plan.tokens * recipe.texts if plan else 0
    own = plan.written if plan is not None and "calibration" not in there else None
    work = estimate.Work(
        stage=recipe.stage,
        tokens=tokens,
        seqlen=plan.seqlen if plan else 0,
        written=0 if own is None or is_written(digest, own) else own.tokens,
        layers=count - done,
        passes=1 + setting.sequential + setting.carries,
        products=setting.products and plan is not None,
        guided=0 if Guide.of(scratch_of(stage)).complete else guided,
        tune_steps=0 if KEY in there else tune_steps,
        iters=recipe.options.get("iters", 0),
        sweeps=recipe.options.get("sweeps", 0),
        trellis=recipe.options.get("w_bits", 3) if common.format == trellis.METHOD else 0,
        together=guided > 0,
        eval_tokens=common.measured,
    )
    common.notice(estimate.line(estimate.seconds(source, work, estimate.measure(source, setting.device))))


def _quantize(
    source: LayerSource,
    stage: Stage,
    setting: Setting,
    recipe: Recipe,
    text: CalibrationText | None,
    common: Common,
    digest: str,
    guided: int,
    tune_steps: int,
    progress: Progress,
    spread: Spread | None,
) -> dict[str, Any]:
    """Everything between an open stage and its files. Returns the quality figures."""
    source.check_finite()
    tokenizer = Tokenizer.open(source.checkpoint.tokenizer_dir)
    ids = text.read(stage, tokenizer, digest, progress) if text else torch.zeros(0, 1, dtype=torch.int64)
    ids = as_met(source.spec, ids)
    table = source.outer_weights(setting.device)[source.spec.embed]
    found: dict[str, Any] = {}
    if recipe.prepare is not None:
        progress(recipe.stage.removeprefix("lite "), 0, 1)
        with spill_of(stage, common) as spill:
            found = recipe.prepare(Prepared(ids, scratch_of(stage), table, setting, progress, spill))
    known = Guide.of(scratch_of(stage))
    if guided:
        told = partial(progress, "taking gradients")
        known.measure(source, ids, guided, setting.device, partial(spill_of, stage, common), told)
    heldout = torch.tensor(tokenizer.encode(heldout_text(common.measured))[: common.measured])
    source.check_tokens(heldout)
    with spill_of(stage, common) as spill:
        flow = Flow(source, ids, table, setting.device, setting.batch_size, spill, known.tokens)
        exact = Flow(source, ids, table, setting.device, setting.batch_size, spill) if setting.carries else None
        probe = Probe(source.spec, table, heldout, setting.device, spill, source.added, source.given)
        del table
        told = partial(progress, "quantizing layers" if tune_steps else "quantizing and measuring layers")
        # where the last layer is there already, the text does not go through the original layers up to it
        stays = setting.sequential or stage.done(f"layer.{len(source.spec.layers) - 1}")
        reports = quantize_layers(source, setting, flow, None if tune_steps else probe, stage, told, spread, exact)
        if tune_steps:
            if exact is not None and exact.layers == len(source.spec.layers):
                flow = exact
            elif stays and not stage.done(KEY):
                table = source.outer_weights(setting.device)[source.spec.embed]
                count = -(-most_samples(tune_steps) // flow.batch_size) * flow.batch_size  # batches as before
                flow = Flow(source, ids[:count], table, setting.device, setting.batch_size, spill)
                flow.through()
            told = partial(progress, "tuning scales")
            found["tuning"] = tune(source, stage, flow, ids, tune_steps, seed=common.seed, progress=told)
            probe_layers(source, setting, probe, stage, partial(progress, "measuring perplexity"))
        progress("measuring perplexity", 0, 1)
        head, outer = load_head(stage), source.outer_weights(setting.device)
        after = None if head is None else outer | {k: v.to(setting.device) for k, v in head.dense().items()}
        return found | probe.figures(outer, after) | {"layers": [dataclasses.asdict(r) for r in reports]}


def _stored_linears(source: LayerSource, selection: Selection) -> list[LinearSpec]:
    """The linears to quantize as the checkpoint stores them, fused ones whole, by their names on disk."""
    found = [
        LinearSpec(item.name, item.matrix[1], item.matrix[0])
        for items in source.stored
        for item in items
        if item.kind == "linear" and item.parts[0].name not in selection.dense
    ]
    return found + [x for x in targets(source, selection) if x.name == source.spec.head]


def _saved(source: LayerSource, recipe: Recipe, common: Common, digest: str) -> SavedStatistics | None:
    if common.calibration is None:
        return None
    if not recipe.calibrated:
        raise UsageError("--calibration: this method reads no statistics; leave the option out")
    if common.calib_dataset != type(common).calib_dataset:
        common.notice(f"--calib-dataset {common.calib_dataset}: not read, for --calibration stands in place of text")
    return open_statistics(user_path(common.calibration).absolute(), digest, source)


def _spread(common: Common, source: LayerSource, setting: Setting, statistics: SavedStatistics | None) -> Spread | None:
    """The workers that ``--ray`` asks for."""
    if common.ray is None:
        return None
    from toolkit.quant.cluster import Place, quantized

    place = Place.of(source, *([statistics.path] if statistics else []))
    return lambda indices: quantized(common, place, setting, indices)


def _size(source: LayerSource, stage: Stage, bits_of: Callable[[Weight], int]) -> dict[str, Any]:
    """Bits a weight over all linears inside layers but routers, and bytes of the weight files."""
    bits = count = 0
    quantizable = {x.name for x in source.quantizable()}
    for result in saved_layers(stage, len(source.spec.layers)):
        for name, value in result.weights.items():
            if name in quantizable:
                bits += bits_of(Dense(value) if isinstance(value, torch.Tensor) else value)
                count += value.shape[0] * value.shape[1]
    size = sum(f.stat().st_size for f in stage.dir.iterdir() if f.suffix in (".safetensors", ".gguf"))
    return {"bits_per_weight": bits / count, "size_bytes": size}
