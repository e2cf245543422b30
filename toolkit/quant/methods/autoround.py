"""auto-round by its own library, one block at a time; what it finds is written like the result of any other method.

Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (2023). The
library tunes a block on its inputs in the original model and in the model quantized so far. It is given our layers as
modules (``forward.layer_forward`` with linears that it may replace), so it needs no class of transformers' and one
layer is in memory at a time. Every block's codes are kept when they are found; the inputs of the next are computed from
the codes as stored, so a run that was killed goes on with the block it was at and ends with the same bits.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.artifacts.canonical import GroupInt
from toolkit.artifacts.weight_files.safetensors_file import map_arrays, write_tensors
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.measure.errors import relative_error
from toolkit.models.sites import Site
from toolkit.models.spec import LayerSpec
from toolkit.quant.layers.along import Along
from toolkit.quant.layers.forward import layer_forward
from toolkit.quant.layers.forward_parts import Called, Weights
from toolkit.quant.layers.result import LinearReport, Made, Method, stay_dense
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.spill import Tensors
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.methods import gptq
from toolkit.quant.methods.awq import Grid, inputs_after
from toolkit.quant.methods.rounded import Rounding
from toolkit.quant.run import Prepared
from toolkit.quant.selection import Selection
from toolkit.runners.weights.folding import Folded


@dataclass(frozen=True)
class Tuning:
    """``iters``: steps of the optimizer a block; 0 rounds to nearest. ``own``: linears, by name, with another grid."""

    grid: Grid
    iters: int
    batch_size: int
    seed: int = 0
    own: Mapping[str, Grid] = field(default_factory=dict)

    def of(self, name: str) -> Grid:
        return self.own.get(name, self.grid)


def tune(source: LayerSource, selection: Selection, run: Prepared, tuning: Tuning) -> None:
    """Find the codes of every selected linear; they are in ``run.directory`` afterwards, a file a layer.

    Raises ToolkitError with the library's reason where it fails.
    """
    run.directory.mkdir(parents=True, exist_ok=True)
    layers = source.spec.layers
    setting = run.setting
    with torch.inference_mode(False), torch.no_grad():
        exact, rounded = (run.flow(source) for _ in range(2))
        for i, layer in enumerate(layers):
            run.progress("tuning the rounding", i, len(layers))
            weights = source.layer(i, setting.device)
            sites = selection.sites(layer)
            if not sites:
                exact.advance(i, layer, weights)
                rounded.advance(i, layer, weights)
                continue
            kept = _file(run.directory, sites)
            if not kept.is_file():
                how = tuning if _reached(layer) else replace(tuning, iters=0)
                codes = _tune_layer(source, i, layer, sites, weights, exact.hidden, rounded.hidden, how)
                write_tensors(kept, {f"{name}:{k}": v for name, code in codes.items() for k, v in _parts(code)})
            found = {name: code.dequantize().to(setting.device) for name, code in _load(kept, sites, tuning).items()}
            exact.advance(i, layer, weights)
            rounded.advance(i, layer, {**weights, **found})
        run.progress("tuning the rounding", len(layers), len(layers))


def _reached(layer: LayerSpec) -> bool:
    """Whether a text goes through any of its linears: those that look at pictures give it nothing to be tuned by."""
    return any(s.mixer.kind != "cross" and getattr(s.mixer, "seen", None) is None for s in layer.sublayers)


def method(directory: Path, tuning: Tuning, *, dtype: torch.dtype, head: str) -> Method:
    """Takes the codes that ``tune`` left in ``directory`` and measures their error. ``head``, the name of what is no
    block, is rounded by GPTQ: tuning it would take longer than all the blocks."""
    by_gptq = gptq.method(tuning.grid, Rounding(shrink=0.0), dtype=dtype)

    def run(
        sites: Sequence[Site], weights: Mapping[str, Tensor], grams: Callable[[str], Gram | None]
    ) -> Iterator[Made]:
        if sites and sites[0].name == head:
            yield from by_gptq(sites, weights, grams)
            return
        codes = _load(_file(directory, sites), sites, tuning) if sites else {}
        for site in reversed(sites):
            yield from one_site(site, weights, codes, grams(site.name))
        yield from stay_dense(sites, weights, dtype)

    def one_site(
        site: Site, weights: Mapping[str, Tensor], codes: Mapping[str, GroupInt], gram: Gram | None
    ) -> Iterator[Made]:  # a function, so that nothing of a site is held beside the next
        xtx = inputs_after(site, gram, Folded(weights))
        how = "weight-only" if gram is None else "auto_round"
        del gram
        for linear in site.linears:
            error = relative_error(weights[linear.name], codes[linear.name], xtx)
            grid = tuning.of(linear.name)
            report = LinearReport(linear.name, how, grid.bits, grid.group_size, error)
            yield Made(linear.name, codes[linear.name], report)

    return run


class _Block(nn.Module):
    """A layer whose ``linears`` are modules. Their names have no dots, as module names must not."""

    def __init__(
        self, layer: LayerSpec, weights: Weights, sites: Sequence[Site], along: Callable[[], Along | None]
    ) -> None:
        super().__init__()
        self.layer, self.plain, self.along = layer, dict(weights), along
        self.places: dict[str, str] = {}
        for linear in [x for site in sites for x in site.linears]:
            module = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias, device="meta")
            module.weight = nn.Parameter(self.plain.pop(linear.name).clone(), requires_grad=False)
            if linear.bias:
                module.bias = nn.Parameter(self.plain.pop(f"{linear.name}.bias").clone(), requires_grad=False)
            self.places[linear.name] = f"linear_{len(self.places)}"
            self.add_module(self.places[linear.name], module)

    def forward(self, hidden: Tensor) -> Tensor:
        modules = {name: getattr(self, place) for name, place in self.places.items()}  # wrapped while they are tuned
        return layer_forward(self.layer, Called(self.plain, modules), hidden.float(), along=self.along())


class _Model(nn.Module):
    """The library takes models, not blocks: one of a single layer. ``name_or_path``: a directory, or it downloads."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([block])
        self.dtype, self.name_or_path, self.config = torch.float32, "/", None

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model.layers[0](hidden)  # type: ignore[operator, index]


def _tune_layer(
    source: LayerSource,
    index: int,
    layer: LayerSpec,
    sites: Sequence[Site],
    weights: Weights,
    exact: Tensors,
    rounded: Tensors,
    tuning: Tuning,
) -> dict[str, GroupInt]:
    try:
        with _quiet(), torch.enable_grad():
            block = _Block(layer, weights, sites, partial(source.along, index))
            _run_library(index, block, exact, rounded, tuning)
    except Exception as error:  # the library raises whatever its parts raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ToolkitError(
            f"{source.path}: auto-round failed at layer {index}: {reason}; try auto_awq or auto_gptq"
        ) from error
    return {name: _code(name, getattr(block, place), tuning.of(name)) for name, place in block.places.items()}


def _run_library(index: int, block: _Block, exact: Tensors, rounded: Tensors, tuning: Tuning) -> None:
    from auto_round import AutoRound

    inputs, quantized = ([row[None] for batch in flow for row in batch] for flow in (exact, rounded))
    grids = {place: tuning.of(name) for name, place in block.places.items()}
    device = next(block.parameters()).device
    rounder = AutoRound(
        _Model(block),
        tokenizer="",
        scheme=f"W{tuning.grid.bits}A16",
        group_size=tuning.grid.group_size,
        sym=tuning.grid.symmetric,
        iters=tuning.iters,
        nsamples=len(inputs),
        seqlen=inputs[0].shape[1],
        batch_size=min(tuning.batch_size, len(inputs)),
        layer_config={
            f"model.layers.0.{place}": {"bits": grid.bits, "group_size": grid.group_size, "sym": grid.symmetric}
            for place, grid in grids.items()
        },
        seed=tuning.seed + index,
        device_map=device.type,
        enable_torch_compile=False,
    )
    rounder.quantize_block(block, [(((x,), {}),) for x in inputs], quantized, device=device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's notes off the terminal, where they would tear the progress bar, and its many garbage
    collections off what is alive already, which takes them most of their time."""
    import auto_round  # noqa: F401  (it sets its logger's level)

    logger: Any = logging.getLogger("autoround")
    level = logger.level
    logger.setLevel(logging.ERROR)
    gc.freeze()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        gc.unfreeze()
        logger.setLevel(level)


def _code(name: str, module: Any, grid: Grid) -> GroupInt:
    """The codes behind a tuned module: its weights lie on the grid of its ``scale`` and ``zp``."""
    weight = module.weight.detach().float().cpu()
    size = weight.shape[1] if grid.group_size == -1 else grid.group_size
    scale = module.scale.detach().to(torch.float16).reshape(weight.shape[0], -1).cpu()
    if not bool(torch.isfinite(scale).all()):
        raise ToolkitError(f"{name}: its scales do not fit float16; leave it out with --skip")
    zero = module.zp if isinstance(module.zp, Tensor) else torch.full(scale.shape, float(module.zp))
    zero = zero.detach().float().reshape(scale.shape).cpu().round()
    step = scale.float()[..., None]
    groups = weight.view(len(weight), -1, size)
    codes = torch.where(step == 0, torch.zeros_like(groups), groups / step).round() + zero[..., None]
    top = 2**grid.bits - 1
    return GroupInt(
        codes=codes.clamp(0, top).to(torch.uint8).view(weight.shape),
        scales=scale,
        zeros=zero.clamp(0, top).to(torch.uint8),
        bits=grid.bits,
        group_size=size,
    )


def _parts(code: GroupInt) -> list[tuple[str, Tensor]]:
    assert code.zeros is not None
    return [("codes", code.codes), ("scales", code.scales), ("zeros", code.zeros)]


def _file(directory: Path, sites: Sequence[Site]) -> Path:
    return directory / f"{sites[0].linears[0].name}.safetensors"


def _load(path: Path, sites: Sequence[Site], tuning: Tuning) -> dict[str, GroupInt]:
    arrays = {name: torch.from_numpy(array.copy()) for name, array in map_arrays(path).items()}
    found = {}
    for linear in [x for site in sites for x in site.linears]:
        grid = tuning.of(linear.name)
        codes, scales, zeros = (arrays[f"{linear.name}:{part}"] for part in ("codes", "scales", "zeros"))
        size = linear.in_features if grid.group_size == -1 else grid.group_size
        found[linear.name] = GroupInt(codes=codes, scales=scales, zeros=zeros, bits=grid.bits, group_size=size)
    return found
