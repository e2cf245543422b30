"""How long a run of ``tool lite`` will take, said before it starts: the work it has, by what this machine does of it.

One layer is run for a moment in the way that each phase runs it. How much of that a method takes beside it was counted
once (``ROUNDING``); figures are meant to be right to a factor of two.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.sites import layer_sites
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers.along import width
from toolkit.quant.layers.forward import in_bf16, layer_forward, narrow
from toolkit.quant.layers.layerwise import CPU_TOKENS
from toolkit.quant.layers.probe import WINDOW
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.methods import sensitivity
from toolkit.quant.methods.awq import SEARCH_ROWS
from toolkit.quant.methods.grid import fake_quantize

# What rounding takes beside AWQ's search, which goes over each weight 40 times (measured on two cores of Zen 5).
ROUNDING = {"lite auto_awq": 1.0, "lite auto_gptq": 0.9, "lite search": 2.0, "lite auto_round": 0.1}
LITTLE = 0.1  # of other methods
AWQ_TRIALS = {"lite auto_awq": 40, "lite search": 40}  # of a scale, each a product of differences and XᵀX
AWQ_PASSES = 40 * 2.6  # over a weight, each as long as rounding it once: candidates, and what is computed of each
# Likewise, of each weight: once through scales and codes, beside products; where gradients guide rows wait for each
# other (the demo's shapes on one core of Zen 4).
SWEEP, GUIDED_SWEEP = 150, 900
TRELLIS = {2: 1360, 3: 790, 4: 660}  # likewise, by bits: scales that are tried, and the cheapest path
TUNING = 2.5  # a step of tuning, in passes of its sample through the model in float32
TEXT = 2.0  # writing text goes through the model in 8 bits: so much faster than float32 a token
START = 6.0  # seconds of reading, checking and writing
SAMPLES = 8  # that auto-round tunes a block on at once, forwards and backwards
GRADIENTS = 3.0  # of a sample's passes through the model in float32: there, there again and back
WEIGHING = 2.0  # of a sample's passes through the model in float32: gradients, and trials
FEW = 4  # times that something is run to know how long it takes


@dataclass(frozen=True)
class Rates:
    """Seconds a token in one layer, in float32 and as statistics take it; seconds an operation of a large product, and
    a weight of rounding it to a grid."""

    exact: float
    rough: float
    product: float
    rounding: float


@dataclass(frozen=True)
class Work:
    """``tokens``: of calibration text, ``seqlen`` a sample; ``written``: of them by the model itself, now. ``layers``:
    that an earlier run has not quantized. ``passes``: of the text through each. ``guided``: samples that
    gradients are taken of. ``iters``: auto-round's. ``sweeps``: of ``descent.py``,
    ``together`` where gradients guide them. ``trellis``: bits of such codes, 0 where there are others."""

    stage: str
    tokens: int
    seqlen: int
    written: int
    layers: int
    passes: int
    products: bool
    guided: int
    tune_steps: int
    iters: int
    eval_tokens: int
    sweeps: int = 0
    together: bool = False
    trellis: int = 0


def measure(source: LayerSource, device: torch.device) -> Rates:
    """Run a layer from the middle of the model for a moment."""
    index = len(source.spec.layers) // 2
    layer, weights = source.spec.layers[index], source.layer(index, device)
    x = torch.randn(1, min(WINDOW, source.spec.max_position), width(source.spec), device=device)
    batch = x[:, : max(1, CPU_TOKENS // 4)].expand(4, -1, -1).contiguous()
    narrowed = narrow(weights, device)
    clocks: list[Callable[[], float]] = [time.perf_counter]
    if device.type == "cpu":  # where a neighbour holds up one thread the others wait: they do not compute so long
        clocks.append(time.process_time)

    def took(run: Callable[[], Tensor]) -> float:
        """Seconds of ``run``, its result being looked at: the least, as other processes take some for a moment."""
        found = []
        for _ in range(FEW):
            begun = [clock() for clock in clocks]
            run().sum().item()
            found += [clock() - at for clock, at in zip(clocks, begun, strict=True)]
        return min(found)

    def rough() -> Tensor:
        with in_bf16(device):
            return layer_forward(layer, narrowed, batch, along=source.along(index))

    wide = max((linear for site in layer_sites(layer) for linear in site.linears), key=_size)
    weight, square = (
        torch.randn(rows, wide.in_features, device=device) for rows in (wide.out_features, wide.in_features)
    )
    return Rates(
        took(lambda: layer_forward(layer, weights, x, along=source.along(index))) / x.shape[1],
        took(rough) / (batch.shape[0] * batch.shape[1]),
        took(lambda: weight @ square) / (2 * _size(wide) * wide.in_features),
        took(lambda: fake_quantize(weight[:SEARCH_ROWS], wide.in_features, bits=4, symmetric=False)) / _sampled(wide),
    )


def seconds(source: LayerSource, work: Work, rates: Rates) -> dict[str, float]:
    """Seconds of each phase."""
    spec = source.spec
    linears = source.quantizable()
    head = spec.vocab_size * spec.hidden_size
    share = work.layers / len(spec.layers)
    passes = work.tokens * len(spec.layers) * rates.rough * work.passes
    sites = [site for layer in spec.layers for site in layer_sites(layer)]
    grams = sum(2 * work.tokens * site.size**2 for site in sites) if work.products else 0
    rounding = ROUNDING.get(work.stage, LITTLE) * AWQ_PASSES * sum(map(_sampled, linears))
    trials = AWQ_TRIALS.get(work.stage, 0) * sum(2 * _sampled(x) * x.in_features for x in linears)
    whole = len(spec.layers) * rates.exact + 2 * head * rates.product  # a token through the model
    found = {
        "gradients": work.guided * work.seqlen * GRADIENTS * whole,
        "text": work.written * 2 * (sum(map(_size, linears)) + head) * rates.product / TEXT,
        "layers": share * (passes + (grams + trials) * rates.product + rounding * rates.rounding),
        "tuning": work.tune_steps * work.seqlen * TUNING * whole,
        "perplexity": 2 * work.eval_tokens * whole,
    }
    if work.stage == "lite search":
        found["weighing"] = WEIGHING * sensitivity.SAMPLES * work.seqlen * whole
    if work.sweeps:
        each = GUIDED_SWEEP if work.together else SWEEP
        again = sum(_size(x) * (each * rates.rounding + 4 * x.in_features * rates.product) for x in linears)
        found["layers"] += share * work.sweeps * again
    if work.trellis:
        found["layers"] += share * TRELLIS[work.trellis] * rates.rounding * sum(map(_size, linears))
    if work.iters:
        found["layers"] += share * len(spec.layers) * work.iters * SAMPLES * work.seqlen * 3 * rates.exact
    return found


def line(found: dict[str, float]) -> str:
    """For the user, before the work."""
    total = START + sum(found.values())
    parts = ", ".join(f"{name} {_clock(took)}" for name, took in found.items() if took >= 1)
    return f"time: about {_clock(total)} on this machine" + (f" ({parts})" if parts else "")


def _clock(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds)):d} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _sampled(linear: LinearSpec) -> int:
    """Weights that a search looks at."""
    return min(linear.out_features, SEARCH_ROWS) * linear.in_features


def _size(linear: LinearSpec) -> int:
    return linear.in_features * linear.out_features
