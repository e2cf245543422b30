"""Any method, layer by layer: statistics in, quantized layer out, saved so that a killed run goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.output.stage import Stage
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.kernels.torch.product import prefers_int8
from toolkit.models.sites import Site, writers
from toolkit.models.spec import LayerSpec
from toolkit.quant.layers.activations import Int8Linears, input_rounding
from toolkit.quant.layers.forward import all_finite, in_bf16, layer_forward, narrow
from toolkit.quant.layers.forward_parts import Called, Observer, Rounding, Weights, normed
from toolkit.quant.layers.heap import give_back, keep_freed
from toolkit.quant.layers.lazy import KEEP
from toolkit.quant.layers.probe import Probe
from toolkit.quant.layers.result import LayerResult, LinearReport, Made, Method, from_state, to_state
from toolkit.quant.layers.source import LayerSource, linear_bytes, module_bytes
from toolkit.quant.layers.spill import Spill, Tensors
from toolkit.quant.layers.statistics import PANEL, Gram, Statistics, Taken, Weigh, all_alike, in_turns
from toolkit.quant.selection import Selection, head_site

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in all)."""
CPU_TOKENS = 2048  # go through a layer at once on a CPU: what lies between its linears then stays in the caches
State = tuple[Iterable[tuple[str, Tensor]], Mapping[str, Any]]  # as ``Stage.save`` takes it
Spread = Callable[[Sequence[int]], Generator[State, None, None]]
"""Layers quantized, each on statistics taken earlier, in the order given (the one after the last is the head)."""
HEAD = "head"  # the stage's key of a quantized head; layers are "layer.N"


@dataclass(frozen=True)
class Setting:
    """How layers are gone through. ``sequential``: statistics are of the inputs that the quantized layers before give,
    not of the original model's. ``carries``: the text goes through that one as well, and what the residual stream lacks
    is among them. ``products``: whether XᵀX is. ``saved``: statistics taken earlier, by layer and site; then no text is
    read."""

    method: Method
    selection: Selection
    device: torch.device
    batch_size: int = 8
    sequential: bool = False
    carries: bool = False
    products: bool = True
    saved: Callable[[int], Mapping[str, Gram]] | None = None


class Enough(Exception):
    """An observer needs no more of a layer."""


class Flow:
    """Calibration text on its way through the layers. ``token_ids`` [samples, length]; ``table``: the embedding;
    ``batch_size``: samples at once, at most; ``spill``: where it is kept between them (None: in memory); ``weigh``: how
    much its tokens count at a site, see ``Statistics``."""

    def __init__(
        self,
        source: LayerSource,
        token_ids: Tensor,
        table: Tensor,
        device: torch.device,
        batch_size: int,
        spill: Spill | None = None,
        weigh: Weigh = all_alike,
    ) -> None:
        keep_freed(small=all(linear_bytes(layer) <= KEEP // 4 for layer in source.spec.layers))
        self.source, self.device, self.weigh = source, device, weigh
        self.layers = 0  # that it is behind
        few = max(1, CPU_TOKENS // token_ids.shape[1])
        self.batch_size = min(batch_size, few) if device.type == "cpu" else batch_size
        batches = token_ids.split(self.batch_size) if len(token_ids) else ()
        self.hidden = Tensors((source.embed(table, b.to(table.device)).cpu() for b in batches), spill)

    @staticmethod
    def between(source: LayerSource, hidden: Iterable[Tensor], device: torch.device) -> Flow:
        """Batches of the text as layers before have left them."""
        flow = Flow(source, torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0), device, 1)
        flow.hidden = Tensors(hidden)
        return flow

    def statistics(
        self,
        index: int,
        layer: LayerSpec,
        weights: Weights,
        sites: Sequence[Site],
        advance: bool,
        products: bool = True,
        exact: Flow | None = None,
    ) -> tuple[Taken, bool]:
        """Statistics of the inputs of ``sites``, and whether the text went through the layer for them.

        With ``advance`` it does where memory holds all statistics at once; else it stays before the layer until all
        are handed out, and is read again for every group of sites. ``exact``: the same text behind the original layers
        before, with which the residual stream is compared; it goes through this one when the last group is taken.
        """
        groups = in_turns(sites) if products else [[site.name for site in reversed(sites)]]

        def look(names: Sequence[str]) -> dict[str, Gram]:
            statistics, narrowed = Statistics(names, products, self.weigh), narrow(weights, self.device)

            def observe(name: str, x: Tensor) -> None:
                statistics.observe(name, x)
                if name == names[0]:  # of the group the last that a layer comes to: what follows need not be computed
                    raise Enough

            last, stream = names == groups[-1], None
            compares = exact is not None and (last or any(x.name in names for x in writers(layer)))
            for j, x in enumerate(self.hidden):
                with in_bf16(self.device):
                    if exact is not None and compares:
                        stream = exact.beside(index, j, narrowed, statistics, advance=last)
                    with suppress(Enough):
                        self._check(index, self._through(index, layer, narrowed, x, observe, stream=stream))
            return self._finite(index, statistics.finish())

        if not advance or len(groups) > 1:
            return Taken(groups, look), False
        statistics = Statistics([name for group in groups for name in group], products, self.weigh)
        self.advance(index, layer, weights, statistics.observe)
        return Taken(groups, lambda names: self._finite(index, statistics.finish())), True

    def beside(self, index: int, batch: int, weights: Weights, statistics: Statistics, advance: bool) -> Observer:
        """What is to see the residual stream of the same batch of another text, and notes for ``statistics`` what that
        lacks of this one's. With ``advance`` the batch is behind the layer then."""
        streams: dict[str, Tensor] = {}
        layer = self.source.spec.layers[index]
        y = self._through(index, layer, weights, self.hidden[batch], stream=streams.__setitem__)
        if advance:
            self.hidden[batch] = self._check(index, y).cpu()
            self.layers = index + 1

        def see(name: str, stream: Tensor) -> None:
            if name in statistics.names:
                statistics.lacks[name] = (streams.pop(name) - stream).reshape(-1, stream.shape[-1])

        return see

    def advance(
        self,
        index: int,
        layer: LayerSpec,
        weights: Weights,
        observe: Observer | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        """Take the text through the layer. Raises ToolkitError that names the layer where it is no longer finite."""
        weights = narrow(weights, self.device)
        for j, x in enumerate(self.hidden):
            with in_bf16(self.device):
                y = self._through(index, layer, weights, x, observe, rounding)
            self.hidden[j] = self._check(index, y).cpu()
        self.layers = index + 1

    def _through(self, index: int, layer: LayerSpec, weights: Weights, x: Tensor, *seen: Any, **more: Any) -> Tensor:
        more |= {"along": self.source.along(index)}
        return layer_forward(layer, weights, x.to(self.device), *seen, **more)

    def head_statistics(self, outer: Weights, products: bool = True) -> dict[str, Gram]:
        """Statistics of the head's input, the text being behind all layers. ``outer`` holds the final norm."""
        spec, statistics = self.source.spec, Statistics([self.source.spec.head], products)
        for x in self.hidden:
            rows = normed(spec.final_norm, outer, x[..., : spec.hidden_size].to(self.device))
            statistics.observe(spec.head, rows.reshape(-1, spec.hidden_size))
        return statistics.finish()

    def through(self) -> None:
        """Take the text through all of the original layers."""
        for i, layer in enumerate(self.source.spec.layers):
            self.advance(i, layer, self.source.layer(i, self.device))

    def _finite(self, index: int, grams: dict[str, Gram]) -> dict[str, Gram]:
        check_finite(self.source, index, grams)
        return grams

    def _check(self, index: int, y: Tensor) -> Tensor:
        if not all_finite(y):
            raise ToolkitError(
                f"{self.source.path}: activations of layer {index} are not finite; nothing to calibrate on"
            )
        return y


def quantize_layers(
    source: LayerSource,
    setting: Setting,
    flow: Flow,
    probe: Probe | None,
    stage: Stage,
    progress: Progress,
    spread: Spread | None = None,
    exact: Flow | None = None,
) -> list[LinearReport]:
    """Quantize every layer and save each under ``layer.N`` in ``stage``, the head under ``head``; ``probe`` goes along,
    if there is one. ``spread``: who does so where statistics were taken earlier, None = this process.

    Unless ``setting.sequential``, statistics are taken in the unquantized model, so a layer's result depends on no
    other's. ``exact``: the text once more, which goes through the original layers, so that what the residual stream
    lacks behind quantized ones is among the statistics. Layers that ``stage`` holds already are not quantized again,
    only passed through. Raises ToolkitError where activations are not finite, naming the layer.
    """
    layers = source.spec.layers
    keys = [f"layer.{i}" for i in range(len(layers))] + ([HEAD] if setting.selection.head else [])
    missing = {i for i, key in enumerate(keys) if not stage.done(key)}
    last_missing = max(missing, default=-1) if setting.saved is None else -1

    def one_layer(i: int) -> list[LinearReport]:  # a function, so that nothing of a layer is held beside the next
        give_back()
        layer, original = layers[i], source.layer(i, setting.device)
        sites = setting.selection.sites(layer)
        moved = setting.sequential or i > last_missing  # the text through the original layer, or it is of no use there
        if i in missing:
            if setting.saved is None:
                grams, advanced = flow.statistics(i, layer, original, sites, not moved, setting.products, exact)
                moved = moved or advanced
                stage.save(keys[i], *_state(setting.method(sites, original, grams), sites, grams))
                del grams
            else:
                stage.save(keys[i], *next(made))
            give_back()
        if not moved:
            flow.advance(i, layer, original)
        result = load_layer(stage, i)
        if probe is not None or setting.sequential:
            after, rounding = _as_run(result, layer, sites, setting.device)
            if setting.sequential and i < last_missing:  # past the last one to quantize nobody reads the text
                flow.advance(i, layer, after, rounding=rounding)
                if exact is not None and exact.layers == i:
                    exact.advance(i, layer, original)
            if probe is not None:
                probe.advance(i, layer, original, after, rounding)
        return _in_order(result.reports, sites)

    reports: list[LinearReport] = []
    here = (saved_state(source, setting, i) for i in sorted(missing))
    with closing(here if spread is None else spread(sorted(missing))) as made:
        for i in range(len(layers)):
            progress(i, len(keys))
            reports += one_layer(i)
        if setting.selection.head:
            progress(len(layers), len(keys))
            if len(layers) in missing and setting.saved is not None:
                stage.save(HEAD, *next(made))
            elif len(layers) in missing:
                outer = source.outer_weights(setting.device)
                found = flow.head_statistics(outer, setting.products)
                stage.save(HEAD, *_head_state(source, setting, outer, found))
            reports += _load(stage, HEAD).reports
    progress(len(keys), len(keys))
    return reports


def probe_layers(source: LayerSource, setting: Setting, probe: Probe, stage: Stage, progress: Progress) -> None:
    """Send ``probe`` through all layers as ``stage`` holds them now."""
    count = len(source.spec.layers)
    for i, layer in enumerate(source.spec.layers):
        progress(i, count)
        result = load_layer(stage, i)
        after, rounding = _as_run(result, layer, setting.selection.sites(layer), setting.device)
        probe.advance(i, layer, source.layer(i, setting.device), after, rounding)
    progress(count, count)


def saved_state(source: LayerSource, setting: Setting, index: int) -> State:
    """Layer ``index``, the one after the last being the head, quantized on ``setting.saved``."""
    assert setting.saved is not None
    found = setting.saved(index)
    if index == len(source.spec.layers):
        return _head_state(source, setting, source.outer_weights(setting.device), found)
    sites = setting.selection.sites(source.spec.layers[index])
    grams = _saved(source, index, sites, found, setting.device)
    return _state(setting.method(sites, source.layer(index, setting.device), grams), sites, grams)


def _head_state(source: LayerSource, setting: Setting, outer: Weights, found: Mapping[str, Gram]) -> State:
    spec, sites = source.spec, [head_site(source)]
    weights = {name: outer[name].float() for name in (spec.head, f"{spec.head}.bias") if name in outer}
    grams = _saved(source, len(spec.layers), sites, found, setting.device)
    return _state(setting.method(sites, weights, grams), sites, grams)


def _saved(
    source: LayerSource, index: int, sites: Sequence[Site], grams: Mapping[str, Gram], device: torch.device
) -> Taken:
    """``grams``, handed out one by one, on ``device``."""

    def take(names: Sequence[str]) -> dict[str, Gram]:
        found = {name: grams[name].to(device) for name in names if name in grams}
        check_finite(source, index, found)
        return found

    return Taken([[site.name] for site in reversed(sites)], take)


def check_finite(source: LayerSource, index: int, grams: Mapping[str, Gram]) -> None:
    """Raise ToolkitError where statistics of layer ``index`` overflow: inputs can be finite whose squares are not."""
    for name, gram in grams.items():
        if not all(bool(torch.isfinite(rows).all()) for rows in (gram.abs_max, *gram.xtx.split(PANEL))):
            raise ToolkitError(
                f"{source.path}: activations of layer {index} overflow at {name}; nothing to calibrate on"
            )


def _state(made: Iterable[Made], sites: Sequence[Site], grams: Taken) -> State:
    """Parameters as they are made, the number of dead inputs in the report of each linear."""
    site_of = {x.name: site.name for site in sites for x in site.linears}

    def counted() -> Iterator[Made]:
        for one in made:
            if one.report is None:
                yield one
            else:
                dead = grams.dead.get(site_of[one.name], 0)
                yield replace(one, report=replace(one.report, dead_inputs=dead))

    return to_state(counted())


def _in_order(reports: Iterable[LinearReport], sites: Sequence[Site]) -> list[LinearReport]:
    """As the linears follow each other in the layer; they are made from the last to the first."""
    found = {r.name: r for r in reports}
    return [found[x.name] for site in sites for x in site.linears]


def _load(stage: Stage, key: str) -> LayerResult:
    return from_state(stage.load(key), stage.load_meta(key))


def load_layer(stage: Stage, index: int) -> LayerResult:
    """The saved result of a layer; its parameters are read when they are asked for."""
    return _load(stage, f"layer.{index}")


def replace_layer(stage: Stage, index: int, result: LayerResult) -> None:
    """Save ``result`` in place of what the layer was."""
    stage.save(f"layer.{index}", *to_state(result.made()))


def load_head(stage: Stage) -> LayerResult | None:
    """The saved result of the head, None where it stays as it is."""
    return _load(stage, HEAD) if stage.done(HEAD) else None


def saved_layers(stage: Stage, count: int) -> Iterator[LayerResult]:
    for i in range(count):
        yield load_layer(stage, i)


def _as_run(
    result: LayerResult, layer: LayerSpec, sites: Sequence[Site], device: torch.device
) -> tuple[Weights, Rounding | None]:
    """The quantized layer, and how inputs of its linears are rounded. It is dense, as much of it in memory as two of
    its modules take, for it is gone through many times while nothing else is held; W8A8 linears run in integers where
    that is faster."""
    room = max(KEEP, 2 * module_bytes(layer))
    dense = result.dense(device, room)
    if device.type != "cpu" or not prefers_int8():
        return dense, input_rounding(sites, result.weights)
    integer = Int8Linears(sites, result.weights, room)
    others = [site for site in sites if site not in integer.sites]
    modules = {name: partial(integer.run, name) for name in integer.names}
    return Called(dense, modules), input_rounding(others, result.weights)
