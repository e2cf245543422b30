"""How much memory a run will take, said before it starts."""

from __future__ import annotations

import math

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.sites import Site, layer_sites, writers
from toolkit.models.spec import LayerSpec, LinearSpec
from toolkit.quant.layers.along import width
from toolkit.quant.layers.lazy import KEEP
from toolkit.quant.layers.probe import WINDOW
from toolkit.quant.layers.source import LayerSource, module_bytes
from toolkit.quant.layers.statistics import in_turns
from toolkit.quant.methods import guide
from toolkit.quant.methods.gptq import batches
from toolkit.quant.methods.rounded import EXACT

BASE = 350 << 20  # the interpreter with torch and the libraries that it loads
BUFFERS = 50 << 20  # work on pieces …
GAPS = 2  # … and what the allocator has not given back at the time, in copies of the largest linear
MATRICES = 2  # of inputs × inputs beside the statistics themselves while a Hessian is factored …
EXACT_MATRICES = 5  # … in float64, where it is small
KEPT_MATRICES = 1  # … and while weights are rounded: its factor
COPIES = 3  # of the linears that are rounded together: read, scaled, ordered or their update
CURVES = 3  # of a linear's outputs × outputs while its rows are rounded: as read, in order, factored
SWEPT = 6  # of rows while they are gone through again: lost, codes, pull, what comes of it, moved and felt
WHOLE = 3  # copies of a layer where a library tunes it as a whole …
OUTPUTS = 5  # … and of its outputs for the text, beside the inputs that it is handed (measured: 4 to 4.6)
FLOAT = 4
LOGITS_BYTES = 300 << 20  # logits before and after with what is computed from them


@dataclass(frozen=True)
class Plan:
    """Bytes: ``peak`` of the process; ``activations`` in all, ``disk`` of them in files."""

    peak: int
    activations: int
    disk: int

    def line(self) -> str:
        """For the user, before anything is read."""
        gib = 1 << 30
        peak, kept = math.ceil(10 * self.peak / gib) / 10, self.activations - self.disk
        return (
            f"memory: peak about {peak:.1f} GiB; activations {kept / gib:.2f} GiB in memory, "
            f"{self.disk / gib:.2f} GiB on disk"
        )


def plan_memory(
    source: LayerSource,
    *,
    samples: int,
    seqlen: int,
    batch_size: int,
    eval_tokens: int,
    cache_memory: float,
    tuning: int = 0,
    head: bool = False,
    whole_layers: bool = False,
    products: bool = True,
    carries: bool = False,
    guided: bool = False,
    swept: bool = False,
) -> Plan:
    """What quantizing ``source`` takes. ``cache_memory``: GiB; 0 ``samples``: no text is read; ``tuning``: bytes that
    tuning takes afterwards; ``head``: whether it is quantized too; ``whole_layers``: whether the method has a layer in
    memory as a whole; ``products``: whether it takes XᵀX; ``carries``: whether it compares the residual stream, and has
    the text twice; ``guided``: whether gradients guide its rounding; ``swept``: whether that is gone through again."""
    spec = source.spec
    text_bytes = (1 + carries) * samples * seqlen * width(spec) * FLOAT
    activations = text_bytes + 2 * eval_tokens * width(spec) * FLOAT
    disk = max(0, activations - int(cache_memory * (1 << 30)))
    grams = samples > 0 and products
    text, window = min(batch_size, samples) * seqlen, min(WINDOW, eval_tokens)
    peaks = [_layer(layer, grams, text, window, whole_layers, carries, guided, swept) for layer in set(spec.layers)]
    if whole_layers:  # two texts; those in files are read whole
        peaks = [peak + min(disk, text_bytes) + OUTPUTS * text_bytes // 2 for peak in peaks]
    table = LinearSpec(spec.head, spec.hidden_size, spec.head_size)
    peaks.append(_bytes(table) + LOGITS_BYTES)  # embedding and head as they are stored, mapped, in 16 bits
    if tuning:
        peaks.append(tuning + LOGITS_BYTES)
    if head:
        peaks.append(_bytes(table) + _rounding([Site(spec.head, spec.hidden_size, (table,), (), None)], grams))
    return Plan(BASE + max(peaks) + activations - disk, activations, disk)


def _layer(
    layer: LayerSpec, grams: bool, text: int, window: int, whole: bool, carries: bool, guided: bool, swept: bool
) -> int:
    """What going through one layer takes: while statistics are taken, while it is rounded, while it is measured.
    ``text``, ``window``: tokens at once of calibration and held-out text."""
    linears, sites = layer.linears(), layer_sites(layer)
    size = sum(map(_bytes, linears))
    if whole:
        return WHOLE * size + max(text, window) * layer_width(layer) * FLOAT
    largest = max(map(_bytes, linears))
    forward, probing = (tokens * layer_width(layer) * FLOAT + 2 * largest for tokens in (text, window))
    missing = 2 * sum(
        map(_bytes, writers(layer) if carries else ())
    )  # of two halves of the text; what is solved for takes as much
    statistics = missing + max(sum(_matrix(s) for s in group) for group in _groups(sites)) if grams else 0
    measured = min(size, max(KEEP, 2 * module_bytes(layer)))
    if grams:  # the text goes through the quantized layer too
        probing = max(forward, probing)
    kept = BUFFERS + min(size, KEEP)
    rounding = 2 * missing + _rounding(sites, grams)
    if guided:
        curves = CURVES * max(map(guide.curve_bytes, guide.guided(layer)), default=0)
        rounding = max(rounding + curves, guide.needed(layer) + forward)
    if swept:
        rounding += max(map(_swept, linears))
    return kept + max(GAPS * largest + max(statistics + forward, rounding), measured + probing)


def _rounding(sites: list[Site], grams: bool) -> int:
    """Statistics that are held together, and what the widest of their sites takes beside them."""
    if not grams:  # one linear after another
        return COPIES * max(_bytes(x) for site in sites for x in site.linears)
    found = 0
    for group in _groups(sites):
        held = sum(map(_matrix, group))
        for site in group:
            largest = max(sum(map(_bytes, batch)) for batch in batches(site.linears))
            matrix = _matrix(site)
            factored = (EXACT_MATRICES if site.size <= EXACT else MATRICES) * matrix
            found = max(found, held + max(factored, KEPT_MATRICES * matrix + COPIES * largest))
    return found


def _swept(linear: LinearSpec) -> int:
    """What ``descent.py`` has beside a linear's weights: of some rows at once, and XᵀX."""
    rows = min(linear.out_features, guide.MOST_ROWS)
    return (SWEPT * rows + linear.in_features) * linear.in_features * FLOAT


def _groups(sites: list[Site]) -> list[list[Site]]:
    by_name = {site.name: site for site in sites}
    return [[by_name[name] for name in names] for names in in_turns(sites)]


def _matrix(site: Site) -> int:
    return site.size**2 * FLOAT


def _bytes(linear: LinearSpec) -> int:
    return linear.in_features * linear.out_features * FLOAT


def layer_width(layer: LayerSpec) -> int:
    """Numbers a token that a forward pass holds at once, at most: of experts, which run one by one, of one."""
    hidden = layer.sublayers[0].mixer.readers()[0].in_features
    parts = (part for sub in layer.sublayers for part in sub.mixer.mlps() or (sub.mixer,))
    return max(part.width(hidden) for part in parts) * 4 // 3 + 4 * hidden
