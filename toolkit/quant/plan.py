"""How much memory a run will take, said before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.models.spec import AttentionSpec, LayerSpec, MlpSpec
from toolkit.quant.layers import LayerSource, layer_linears
from toolkit.quant.sites import layer_sites

BASE = 600 << 20  # the interpreter with torch, buffers
COPIES = 3.0  # of a layer in float32: as it is, scaled, and rounded again; codes and 16-bit copies are the rest
MATRICES = 4  # of inputs × inputs beside the statistics themselves: scaled, damped, factored, inverted
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
        kept = self.activations - self.disk
        return (
            f"memory: peak about {self.peak / gib:.1f} GiB; activations {kept / gib:.2f} GiB in memory, "
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
) -> Plan:
    """What quantizing ``source`` takes. ``cache_memory``: GiB; 0 ``samples``: no text is read; ``tuning``: bytes that
    tuning takes afterwards."""
    spec = source.spec
    row = spec.hidden_size * FLOAT
    activations = (samples * seqlen + 2 * eval_tokens) * row
    disk = max(0, activations - int(cache_memory * (1 << 30)))
    layer = max(sum(_bytes(x.in_features, x.out_features) for x in layer_linears(layer)) for layer in spec.layers)
    grams, widest = 0, 0
    if samples:
        sizes = [[_bytes(site.size, site.size) for site in layer_sites(layer)] for layer in spec.layers]
        grams, widest = max(map(sum, sizes)), max(map(max, sizes))
    tokens = max(min(batch_size, samples) * seqlen, min(1024, eval_tokens))
    working = tokens * max(layer_width(layer) for layer in spec.layers) * FLOAT
    forward, rounding = working, MATRICES * widest
    layers = int(COPIES * layer) + grams + max(forward, rounding, LOGITS_BYTES)
    peak = BASE + max(layers, tuning + LOGITS_BYTES if tuning else 0) + activations - disk
    return Plan(peak, activations, disk)


def _bytes(rows: int, columns: int) -> int:
    return rows * columns * FLOAT


def layer_width(layer: LayerSpec) -> int:
    """Numbers a token that a forward pass holds at once, at most."""
    widths = []
    for sub in layer.sublayers:
        match sub.mixer:
            case AttentionSpec() as a:
                widths.append(2 * (a.q.out_features + a.k.out_features + a.v.out_features) + 3 * a.q.in_features)
            case MlpSpec() as m:
                widths.append(4 * m.up.out_features + 3 * m.up.in_features)
            case m:
                widths.append(4 * m.experts[0].up.out_features + 4 * m.router.in_features)
    return max(widths)
