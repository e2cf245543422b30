"""One layer of any spec over whole sequences in float32: what calibration and the held-out figures run on.

No cache, no paging, one layer's weights in memory at a time. Weights are a mapping from canonical names to dense
tensors: ``X`` [out, in] for a linear, ``X.bias`` [out], ``N`` [size] for a norm or a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.reference.activation import swigluoai, xielu
from toolkit.kernels.reference.moe import moe_route
from toolkit.kernels.torch.dense import ACTIVATIONS
from toolkit.kernels.torch.product import product
from toolkit.models.sites import writer
from toolkit.models.spec import DecoderSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec, PerLayerSpec, PerLayerTable
from toolkit.quant.layers.along import Along, width
from toolkit.quant.layers.forward_attention import attention, latent_attention, reuse
from toolkit.quant.layers.forward_parts import Called, Observer, Rounding, Watch, Weights, linear, normed
from toolkit.quant.layers.forward_states import delta, mamba, short_conv
from toolkit.quant.layers.lazy import KEEP, Lazy
from toolkit.runners.tensor.devices.find import bf16_is_native

HEAD_ELEMENTS = (1 << 20, 1 << 24)  # of the head that are multiplied at once: on a CPU, which caches the part; others


def layer_forward(
    layer: LayerSpec,
    weights: Weights,
    hidden: Tensor,
    observe: Observer | None = None,
    rounding: Rounding | None = None,
    stream: Observer | None = None,
    along: Along | None = None,
) -> Tensor:
    """Run one layer on ``hidden`` [batch, length, hidden] (positions 0 … length-1, causal) and return the new hidden;
    where something goes ``along`` with the stream, [batch, length, ``width``] both.

    ``observe`` sees the input of every site of the layer; ``rounding`` changes what its linears read (routers and
    gates, which are never quantized, read it unchanged). ``stream`` sees, before each sublayer that has a ``writer``
    and under that linear's name, what its outputs are added to, in their scale [batch, length, hidden].
    """
    watch = Watch(observe, rounding, along)
    if along is not None:
        hidden, along.columns = hidden[..., : along.hidden], hidden[..., along.hidden :]
    block = hidden
    for i, sub in enumerate(layer.sublayers):
        if not layer.shares(i):
            source = block if layer.beside(i) else hidden
            x = source if sub.pre_norm is None else normed(sub.pre_norm, weights, source)
            hidden = x if sub.carries else hidden
            if torch.is_autocast_enabled(x.device.type):  # once, not for every linear that reads it
                x = x.to(torch.get_autocast_dtype(x.device.type))
            seen = watch(sub.mixer.input_name(), x)
        if stream is not None and (last := writer(sub)) is not None:
            stream(last.name, hidden / sub.residual_scale)
        y = MIXERS[sub.mixer.kind](sub.mixer, weights, x, seen, watch)
        if sub.post_norm is not None:
            y = normed(sub.post_norm, weights, y)
        hidden = torch.add(hidden, y, alpha=sub.residual_scale)
        hidden = hidden if sub.factor is None else hidden * weights[sub.factor].float()
    return hidden if along is None else torch.cat([hidden, along.columns], -1)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def all_finite(x: Tensor) -> bool:
    """Whether ``x`` holds neither infinity nor NaN, which extremes pass on: one look where ``isfinite`` takes three."""
    return all(bool(torch.isfinite(extreme)) for extreme in x.aminmax())


def fast_bf16(device: torch.device) -> bool:
    """Whether products of bfloat16 are faster there than of float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return device.type == "cpu" and bf16_is_native()


def in_bf16(device: torch.device) -> AbstractContextManager[object]:
    """A context in which linears and attention multiply bfloat16 where ``fast_bf16``: exact enough for statistics of
    inputs and for tuning, not for figures."""
    return torch.autocast(device.type, torch.bfloat16) if fast_bf16(device) else nullcontext()


def narrow(weights: Weights, device: torch.device) -> Weights:
    """``weights`` for use ``in_bf16``: matrices are converted once, not at every use, as far as ``KEEP`` holds them."""
    if not fast_bf16(device):
        return weights

    def read(name: str) -> Tensor:
        weight = weights[name]
        return weight.bfloat16() if weight.dim() > 1 else weight

    found = Lazy(weights, read, KEEP)
    return Called(found, weights.modules) if isinstance(weights, Called) else found


def embed(
    spec: DecoderSpec,
    table: Tensor,
    token_ids: Tensor,
    rows: Tensor | None = None,
    added: Added | None = None,
    given: Given | None = None,
) -> Tensor:
    """Hidden states [batch, length, ``width``] (float32) of token ids [batch, length]. Ids behind the vocabulary are
    those of ``rows`` [count, hidden], what pictures became. ``added``: see ``added_by``."""
    if rows is None:
        found = table[token_ids].float() * spec.embed_scale
        found = found if added is None else added(found)
        return _with_room(spec, found, token_ids, given)
    shown = token_ids >= spec.vocab_size
    found = table[token_ids.masked_fill(shown, 0)].float()
    found[shown] = rows.to(found.device)[token_ids[shown] - spec.vocab_size]
    pad = 0 if spec.per_layer is None else spec.per_layer.pad
    return _with_room(spec, found * spec.embed_scale, token_ids.masked_fill(shown, pad), given)


def _with_room(spec: DecoderSpec, x: Tensor, token_ids: Tensor, given: Given | None) -> Tensor:
    """``x``, and behind it room for what goes along with it."""
    if (more := width(spec) - spec.hidden_size) == 0:
        return x
    parts = [x] if given is None else [x, given(x, token_ids)]
    return torch.cat([*parts, x.new_zeros(*x.shape[:-1], more - sum(p.shape[-1] for p in parts[1:]))], -1)


@dataclass(frozen=True)
class Given:
    """What layers are given of tokens (``PerLayerTable``): ``rows`` of the table by token, projection and norm among
    ``weights``."""

    spec: PerLayerTable
    rows: Callable[[Tensor], Tensor]
    weights: Mapping[str, Tensor]

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """``x`` [batch, length, hidden], ``token_ids`` [batch, length] -> [batch, length, columns]."""
        own = {name: weight.to(x.device).float() for name, weight in self.weights.items()}
        told = linear(self.spec.projection, own, x) * self.spec.projection_scale
        told = normed(self.spec.norm, own, told.unflatten(-1, (-1, self.spec.norm.size))).flatten(-2)
        return (told + self.rows(token_ids).to(x.device).float() * self.spec.embed_scale) * self.spec.scale


@dataclass(frozen=True)
class Added:
    """``rows`` [positions, hidden] are added to embeddings, whose sum is normed by ``norm`` of ``weights``."""

    rows: Tensor
    norm: NormSpec | None
    weights: Mapping[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [batch, length, hidden] of texts that begin at position 0."""
        x = x + self.rows[: x.shape[-2]].to(x.device)
        return x if self.norm is None else normed(self.norm, {n: w.to(x.device) for n, w in self.weights.items()}, x)


def added_by(spec: DecoderSpec, outer: Mapping[str, Tensor]) -> Added | None:
    """What is added to the tokens of texts that stand alone, or None. ``outer``: what stands outside of layers."""
    encoder = spec.encoder
    if encoder is None or not (encoder.types or encoder.positions or encoder.norm):
        return None
    found = torch.zeros(spec.max_position, spec.hidden_size)
    for name, start in ((encoder.types, 0), (encoder.positions, encoder.offset)):
        if name is not None:
            rows = outer[name].float().cpu().view(-1, spec.hidden_size)
            found += rows[0] if name == encoder.types else rows[start : start + spec.max_position]
    names = () if encoder.norm is None else encoder.norm.vectors()
    return Added(found, encoder.norm, {name: outer[name].float().cpu() for name in names})


def head_logits(spec: DecoderSpec, weights: Weights, hidden: Tensor) -> Tensor:
    """Logits of ``hidden`` (before the final norm). ``weights`` holds the final norm and ``spec.head``, of any float
    type; the head is widened to float32 a part at a time, except under autocast."""
    x, head = normed(spec.final_norm, weights, hidden[..., : spec.hidden_size]), weights[spec.head]
    if torch.is_autocast_enabled(x.device.type):
        logits = F.linear(x, head)
    else:
        rows = max(1, HEAD_ELEMENTS[x.device.type != "cpu"] // head.shape[1])
        parts = (product(x, part.float()) for part in head.split(rows))
        if torch.is_grad_enabled() and x.requires_grad:
            logits = torch.cat(list(parts), dim=-1)
        else:
            logits = x.new_empty(*x.shape[:-1], len(head))
            for a, part in enumerate(parts):
                logits[..., a * rows : (a + 1) * rows] = part
    if (bias := weights.get(f"{spec.head}.bias")) is not None:
        logits = logits + bias.float()
    if spec.head_scale != 1.0:
        logits = logits * spec.head_scale
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
    return logits


def _mlp(m: MlpSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    if m.seen is not None:
        return _nothing(m, weights, raw, x, watch)
    up = linear(m.up, weights, x)
    if m.curve is not None:
        inner = xielu(up, *(weights[name] for name in m.curves()))
    elif m.gate is None:
        inner = ACTIVATIONS[m.activation](up)
    elif m.activation == "swigluoai":
        inner = swigluoai(linear(m.gate, weights, x) * m.gate_scale, up)
    else:
        inner = ACTIVATIONS[m.activation](linear(m.gate, weights, x) * m.gate_scale) * up
    inner = inner if m.inner_norm is None else normed(m.inner_norm, weights, inner)
    return linear(m.down, weights, watch(m.down.name, inner))


def _nothing(m: Any, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """What looks at pictures gives texts."""
    return torch.zeros_like(raw)


def _moe(m: MoeSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """Every expert on the tokens routed to it."""
    shape, raw, seen = x.shape, _rows(raw), _rows(x)
    beside = seen
    if m.apart is not None:
        seen, beside = (watch(e[0].readers()[0].name, normed(n, weights, raw)) for e, n in m.normed())
        raw = normed(m.apart.router, weights, raw)
    logits = linear(m.router, weights, raw).float() * m.logit_scale  # under autocast a linear gives less
    gate = None if m.shared_gate is None else torch.sigmoid(linear(m.shared_gate, weights, raw))
    each = None if m.each is None else weights[m.each].float()
    correction = None if m.correction is None else weights[m.correction].float()
    groups = m.groups, m.top_groups, m.group_score
    chosen, best = moe_route.reference(
        logits, m.top_k, m.scoring, m.norm_topk, m.scale, correction, *groups, jitter=m.jitter
    )
    best = best if each is None else best * each[chosen]
    out = torch.zeros_like(raw, dtype=torch.float32)
    for i, expert in enumerate(m.experts):
        token, place = torch.where(chosen == i)
        if token.numel():
            share = best[token, place][:, None]
            rows = seen[token] * share.to(seen.dtype) if m.weigh_input else seen[token]
            y = _mlp(expert, weights, raw, rows, watch)
            out.index_add_(0, token, (y if m.weigh_input else y * share).float())
    if m.shared is not None:
        y = _mlp(m.shared, weights, raw, beside, watch)
        if m.apart is not None:
            out, y = normed(m.apart.experts_out, weights, out), normed(m.apart.shared_out, weights, y)
        out = out + (y if gate is None else y * gate)
    return out.view(shape)


def _per_layer(m: PerLayerSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    assert watch.along is not None, "what layers are given goes along"
    given = watch.along.given(m.at, m.gate.out_features)
    inner = ACTIVATIONS[m.activation](linear(m.gate, weights, x)) * given.to(x.dtype)
    return linear(m.down, weights, watch(m.down.name, inner))


MIXERS: dict[str, Callable[[Any, Weights, Tensor, Tensor, Watch], Tensor]] = {
    "attention": attention,
    "reuse": reuse,
    "latent": latent_attention,
    "cross": _nothing,
    "short_conv": short_conv,
    "mamba": mamba,
    "delta": delta,
    "mlp": _mlp,
    "moe": _moe,
    "per_layer": _per_layer,
}
"""By kind. Called with the mixer, the layer's weights, its input [batch, length, hidden], the same as linears read it
(rounded, where activations are), and what watches the inputs inside. Returns [batch, length, hidden]."""
