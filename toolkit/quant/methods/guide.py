"""What an error of one output does to the model's predictions beside errors of others, and rounding that goes by it.

GPTQ lets columns make up for each other: an error Δ of a linear costs it tr(Δ XᵀX Δᵀ), every output by itself. What it
costs the predictions is close to tr(H Δ XᵀX Δᵀ), with H [out, out] the mean of ‖x‖²·g·gᵀ over the text and g gradients
by the outputs (``sensitivity``). So rows make up for each other as well: with H = L D Lᵀ it is Σ Dᵢ·‖Eᵢ‖² of
Eᵢ = Δᵢ + Σ L[k,i]·Δₖ over k > i, and GPTQ rounds row i for what the rows behind it have lost. Rows go in blocks, as
each takes a walk over all columns. In XᵀX a token counts as its gradients are large.

Source: Tseng, Sun and De Sa, "Model-Preserving Adaptive Rounding" (2025), whose H is this one (sketch A, one step) and
whose feedback goes both ways.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.whole_file import write_whole
from toolkit.errors import UsageError
from toolkit.kernels.torch.product import product
from toolkit.models.sites import Site, layer_sites
from toolkit.models.spec import LayerSpec, LinearSpec
from toolkit.quant.layers.forward import fast_bf16
from toolkit.quant.layers.forward_parts import Weights
from toolkit.quant.layers.source import LayerSource, module_bytes
from toolkit.quant.layers.spill import Spill
from toolkit.quant.layers.statistics import shrink
from toolkit.quant.methods.sensitivity import feel, passing
from toolkit.quant.text.calibration import CalibrationPlan

MOST_ROWS = 4096  # of one H: those of a larger linear are dealt out to several
MOST_BLOCKS, FEWEST_ROWS = 15, 32  # blocks of rows; rows of one
DAMP = 0.03  # share of H's mean diagonal that is added to it
MOST_WEIGHT = 50.0  # of a token, by the mean of all
AT_ONCE = 32  # samples whose activations are held, before every layer
BLOCKS = 3  # in float32: as much as a layer takes without gradients
DONE = "done"
TOKENS = ".tokens"  # behind a site's name


def choose_samples(
    source: LayerSource,
    wanted: int | None,
    usual: int,
    plan: CalibrationPlan | None,
    cache_memory: float,
    notice: Callable[[str], None],
) -> int:
    """How many samples are to guide: ``wanted``, or where that is None the ``usual`` if that takes no more memory than
    ``BLOCKS`` of the largest block beside ``cache_memory`` (GiB). ``plan``: of the text, None where none is read.
    Raises UsageError."""
    if wanted is not None and wanted < 0:
        raise UsageError(f"--guide-samples: expected 0 or more, found {wanted}")
    if wanted and plan is None:
        raise UsageError(
            "--guide-samples: it reads calibration text, and --calibration gives statistics alone; leave the option out"
        )
    count = min(usual if wanted is None else wanted, plan.samples if plan else 0)
    gib = max(map(needed, source.spec.layers)) / (1 << 30)
    allowed = cache_memory + BLOCKS * max(map(module_bytes, source.spec.layers)) / (1 << 30)
    if wanted is None and count and gib > allowed:
        notice(
            f"no gradients guide the rounding: they take {gib:.1f} GiB, {allowed:.1f} are allowed for; "
            f"--guide-samples {count} takes them all the same"
        )
        return 0
    return count


def needed(layer: LayerSpec) -> int:
    """Bytes of a layer while gradients pass it: its weights, of which none can go before all are done, and its H."""
    return sum(2 * x.in_features * x.out_features for x in layer.linears()) + sum(map(curve_bytes, guided(layer)))


def guided(layer: LayerSpec) -> list[LinearSpec]:
    """The linears that every token passes: no experts."""
    return [x for sub in layer.sublayers if len(sub.mixer.mlps()) < 2 for x in sub.mixer.linears()]


def curve_bytes(linear: LinearSpec) -> int:
    """Of its H, all parts, in float32."""
    return 4 * linear.out_features * -(-linear.out_features // parts(linear.out_features))


def parts(rows: int) -> int:
    """How many H a linear of so many outputs has: of each so-manieth row."""
    return -(-rows // MOST_ROWS)


def stored_bytes(layers: Sequence[LayerSpec]) -> int:
    """Bytes of the files of ``Guide.measure``."""
    return sum(curve_bytes(x) for layer in layers for x in guided(layer)) // 2


@dataclass
class Curvature:
    """Of one layer, while so many ``samples`` of so many tokens (``length``) pass it, by linear: H, its parts, not yet
    divided by the number of tokens; and ‖g‖² of each token, by sample. ``whole``: those that no token passed by."""

    samples: int
    length: int
    found: dict[str, list[Tensor]] = field(default_factory=dict)
    tokens: dict[str, list[Tensor]] = field(default_factory=dict)

    def observe(self, site: str, x: Tensor) -> None:
        """Nothing is asked of inputs alone."""

    def linear(self, name: str, weights: Weights) -> Callable[[Tensor], Tensor]:
        def seen(x: Tensor, g: Tensor) -> None:
            if len(x) != self.length:
                return
            self.tokens.setdefault(name, []).append(g.square().sum(1))
            g = (g * x.norm(dim=1, keepdim=True)).to(torch.bfloat16 if fast_bf16(g.device) else g.dtype)
            count = parts(g.shape[1])
            now = [product(own, own).float() for own in (g[:, c::count].T.contiguous() for c in range(count))]
            before = self.found.get(name)
            self.found[name] = now if before is None else [a.add_(b) for a, b in zip(before, now, strict=True)]

        return passing(name, weights, seen)

    @property
    def whole(self) -> set[str]:
        return {name for name, rows in self.tokens.items() if len(rows) == self.samples}

    def weights(self, site: Site) -> Tensor | None:
        """How much each token that passed counts at a site, [samples, length]: as the gradients of its linears are
        large. None where nothing is known."""
        if not {x.name for x in site.linears} <= self.whole:
            return None
        sizes = [torch.cat(self.tokens[x.name]) for x in site.linears]
        share = torch.stack([one / one.mean() for one in sizes]).mean(0).clamp(max=MOST_WEIGHT)
        return (share / share.mean()).view(-1, self.length)


@dataclass(frozen=True)
class Guide:
    """What gradients tell of a model, kept in ``directory``: a file a linear, and one a site."""

    directory: Path

    @staticmethod
    def of(scratch: Path) -> Guide:
        """That of a run with such a directory for what it knows."""
        return Guide(scratch / "guide")

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return (self.directory / DONE).is_file()

    def measure(
        self,
        source: LayerSource,
        ids: Tensor,
        samples: int,
        device: torch.device,
        spill: Callable[[], Spill],
        told: Callable[[int, int], None],
    ) -> None:
        """Send so many ``samples`` of the text ``ids`` [all samples, length], from all over it, through the original
        model and back, ``AT_ONCE``. ``spill`` gives room for their activations. A run that goes on has been there
        already."""
        if self.complete:
            return
        shutil.rmtree(self.directory, ignore_errors=True)  # of a run that was killed
        self.directory.mkdir(parents=True)
        some = torch.linspace(0, len(ids) - 1, min(samples, len(ids))).round().long()
        groups = some.split(AT_ONCE)
        with torch.inference_mode(False), torch.no_grad():
            for g, group in enumerate(groups):
                listener = partial(Curvature, len(group), ids.shape[1])
                progress = partial(_one_of, told, g, len(groups))
                with spill() as room:
                    for i, _, layer in feel(source, ids[group], device, room, progress, listener, seed=g):
                        self._note(layer, layer_sites(source.spec.layers[i]), ids.shape, group)
        write_whole(self.directory / DONE, b"")

    def _note(self, layer: Curvature, sites: Sequence[Site], shape: torch.Size, group: Tensor) -> None:
        """Keep what a group of samples tells of a layer, beside what others have."""
        for site in sites:
            share = layer.weights(site)
            if share is not None and bool(torch.isfinite(share).all()):
                before = self._read(f"{site.name}{TOKENS}") or [torch.ones(shape)]
                self._write(f"{site.name}{TOKENS}", [before[0].index_copy(0, group, share.cpu())])
        for name in layer.whole:
            before = self._read(name) or [torch.zeros(())] * len(layer.found[name])
            found = [own.cpu() + other for own, other in zip(layer.found[name], before, strict=True)]
            if all(0 < float(h.diagonal().mean()) < math.inf for h in found):
                self._write(name, [h.bfloat16() for h in found])

    def curves(self, name: str) -> list[Tensor] | None:
        """The H of a linear, its parts; None where nothing is known."""
        return self._read(name)

    def tokens(self, site: str) -> Tensor | None:
        """How much each token counts at a site: ``statistics.Weigh``. Those without gradients count 1."""
        found = self._read(f"{site}{TOKENS}")
        return None if found is None else found[0].flatten()

    def _write(self, name: str, parts: Sequence[Tensor]) -> None:
        write_whole(self.directory / name, save({str(i): part for i, part in enumerate(parts)}))

    def _read(self, name: str) -> list[Tensor] | None:
        if not (self.directory / name).is_file():
            return None
        found = load_file(self.directory / name)
        return [found[str(i)].float() for i in range(len(found))]


def _one_of(told: Callable[[int, int], None], index: int, count: int, done: int, total: int) -> None:
    """Progress of one of so many rounds."""
    told(index * total + done, count * total)


def blocks(curve: Tensor, divisor: Tensor | None, share: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows in the order they are to be rounded, a block at a time: which they are; what they have to make up for, a
    matrix [rows, rows before them] times what these have lost; and which those are.

    ``curve``: H [out, out] of a linear whose row i has since been divided by ``divisor[i]``; ``share``: by which it is
    shrunk, as XᵀX is. A block's rows do not make up for each other, so they lie apart: neighbours, and pairs that RoPE
    turns together, have most to do with each other.
    """
    rows = len(curve)
    count = max(1, min(MOST_BLOCKS, rows // FEWEST_ROWS))
    count -= count % 2 == 0  # RoPE's pairs are a power of two apart
    order = torch.cat([torch.arange(b, rows, count, device=curve.device) for b in range(count)])
    lower, stop = _factor(damped(curve, divisor, share)[order[:, None], order]), rows
    for b in reversed(range(count)):
        start = stop - len(range(b, rows, count))
        corner, across = lower[start:stop, start:stop], lower[stop:, start:stop]
        yield order[start:stop], torch.linalg.solve_triangular(corner.T, across.T, upper=True), order[stop:]
        stop = start


def damped(curve: Tensor, divisor: Tensor | None, share: float) -> Tensor:
    """H as rounding goes by it: of rows that have been divided, shrunk, and positive definite."""
    curve = curve.clone()
    if divisor is not None:
        curve.mul_(divisor[:, None]).mul_(divisor)
    shrink(curve, share).diagonal().add_(DAMP * curve.diagonal().mean())
    return curve


def _factor(curve: Tensor) -> Tensor:
    """The lower Cholesky factor of H, which is damped further in place, the more the longer there is none."""
    damp = DAMP * curve.diagonal().mean()
    while True:
        lower, failed = torch.linalg.cholesky_ex(curve)
        if not int(failed):
            return lower
        damp *= 10
        curve.diagonal().add_(damp)
