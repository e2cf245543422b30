"""From a spec and its weights to a ``Decoder``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from toolkit.artifacts.adapters.adapter import fold
from toolkit.artifacts.canonical import GroupInt, Weight
from toolkit.errors import ToolkitError
from toolkit.kernels.cuda.linear import PackedLinear
from toolkit.kernels.cuda.pack import unsupported_form
from toolkit.models.routed import Routed
from toolkit.models.spec import Apart as ApartSpec
from toolkit.models.spec import (
    AttentionSpec,
    ConvSpec,
    CrossSpec,
    DecoderSpec,
    DeltaSpec,
    EncoderSpec,
    LatentSpec,
    LayerSpec,
    LinearSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    PerLayerSpec,
    PerLayerTable,
    ReuseSpec,
    ShortConvSpec,
)
from toolkit.runners.tensor.decoder import Added, Apart, Attention, Decoder, Mixer, Mlp, Moe, RoundingNorm, Step
from toolkit.runners.tensor.layers.cross import Cross
from toolkit.runners.tensor.layers.experts import stack_experts
from toolkit.runners.tensor.layers.latent import LatentAttention
from toolkit.runners.tensor.layers.linear import Bound, Linear, Placement, codes_of, make_linear
from toolkit.runners.tensor.layers.lora import Adapters, AdapterStep, adapt
from toolkit.runners.tensor.layers.mutual import bias_rows
from toolkit.runners.tensor.layers.norms import LayerNorm, Norm, SpreadNorm
from toolkit.runners.tensor.layers.per_layer import Given, PerLayer
from toolkit.runners.tensor.layers.placed import Placed
from toolkit.runners.tensor.layers.recurrent import Delta, Mamba
from toolkit.runners.tensor.layers.reuse import Reuse
from toolkit.runners.tensor.layers.routed import by_kind
from toolkit.runners.tensor.layers.short_conv import Conv, ShortConv
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.split import Split, Summed
from toolkit.runners.tensor.traits import routes_specially
from toolkit.runners.weights.info import info_of, scales_of

Weights = Mapping[str, Weight | Tensor]


class _Builder:
    """Turns a spec and its weights into callables."""

    def __init__(
        self,
        weights: Weights,
        place: Placement,
        ops: Ops,
        adapters: Adapters,
        adapter_step: AdapterStep,
        routed: Mapping[str, Routed],
        split: Split | None = None,
    ) -> None:
        self.split = split
        self.weights, self.place, self.ops = weights, place, ops
        self.adapters, self.adapter_step, self.routed = adapters, adapter_step, routed
        self.kept: dict[int, Attention] = {}  # by layer

    def tensor(self, name: str) -> Tensor:
        found = self.weights[name]
        assert isinstance(found, Tensor), name
        return found.to(self.place.device)

    def matrix(self, name: str) -> Weight:
        found = self.weights[name]
        assert not isinstance(found, Tensor), name
        return found

    def info(self, name: str) -> Weight:
        found = info_of(self.weights, name)
        assert not isinstance(found, Tensor), name
        return found

    def linear(self, *specs: LinearSpec) -> Linear:
        pairs = [(self.matrix(s.name), self.tensor(f"{s.name}.bias") if s.bias else None) for s in specs]
        base = make_linear([w for w, _ in pairs], [b for _, b in pairs], self.place, self.ops)
        base = by_kind(base, specs, self.routed, self.weights, self.adapter_step, self.place)
        return adapt(base, specs, self.adapters, self.adapter_step, self.place, self.ops)

    def outer(self, spec: LinearSpec) -> Linear:
        """The last linear of a sublayer, of which every rank has a part of the inputs."""
        base = self.linear(spec)
        return base if self.split is None else Summed(base, self.split)

    def norm(self, spec: NormSpec | None) -> Norm | LayerNorm | None:
        if spec is None:
            return None
        weight = self.tensor(spec.name).float() if spec.weight else torch.ones(spec.size, device=self.place.device)
        if spec.kind == "rms":
            return Norm(weight + spec.weight_offset, spec.eps, self.ops)
        shape = (spec.size,) if spec.heads == 1 else (spec.heads, spec.size)
        bias = self.tensor(f"{spec.name}.bias").float().view(shape) if spec.bias else None
        return LayerNorm((weight + spec.weight_offset).view(shape), bias, spec.eps, self.ops)

    def head_norm(self, spec: NormSpec | None) -> Norm | LayerNorm | SpreadNorm | None:
        """One that may be over what several ranks have."""
        if spec is None or spec.spread is None:
            return self.norm(spec)
        assert self.split is not None, spec.name
        weight = self.tensor(spec.name).float() if spec.weight else torch.ones(spec.size, device=self.place.device)
        bias = self.tensor(f"{spec.name}.bias").float() if spec.bias else None
        return SpreadNorm(spec, weight + spec.weight_offset, bias, self.split)

    def attention(self, spec: AttentionSpec, layer: int) -> Attention:
        self.kept[layer] = Attention(
            spec=spec,
            layer=layer,
            qkv=self.linear(*spec.readers()),
            o=self.outer(spec.o),
            q_norm=self.head_norm(spec.q_norm),
            k_norm=self.head_norm(spec.k_norm),
            v_norm=self.norm(spec.v_norm),
            o_norm=self.head_norm(spec.o_norm),
            sinks=None if spec.sinks is None else self.tensor(spec.sinks).float(),
            more=self.attention_options(spec),
            scales=(self.cache_scale(spec.k, "k_scale"), self.cache_scale(spec.v, "v_scale")),
            ops=self.ops,
            bias=None if (bias := spec.position_bias) is None else bias_rows(bias, self.tensor(bias.name).float()),
        )
        return self.kept[layer]

    def reuse(self, spec: ReuseSpec, layer: int) -> Reuse:
        ends, kept = (self.linear(spec.q), self.outer(spec.o)), self.kept[spec.source]
        if spec.outside:
            kept = replace(kept, spec=replace(kept.spec, window=spec.newest))
        return Reuse(spec, *ends, self.norm(spec.q_norm), kept.find, self.ops)

    def per_layer(self, spec: PerLayerSpec, layer: int) -> PerLayer:
        return PerLayer(spec, self.linear(spec.gate), self.outer(spec.down), self.ops)

    def given(self, spec: PerLayerTable) -> Given:
        table = self.matrix(spec.embed).dequantize(self.place.dtype).to(self.place.device)
        norm = self.norm(spec.norm)
        assert norm is not None
        return Given(spec, table, self.linear(spec.projection), norm, self.ops)

    def latent(self, spec: LatentSpec, layer: int) -> LatentAttention:
        kv_norm, whole = self.norm(spec.kv_a_norm), self.matrix(spec.kv_b.name).dequantize(self.place.dtype)
        assert kv_norm is not None
        by_head = whole.to(self.place.device).view(spec.heads, spec.nope_dim + spec.v_dim, spec.kv_rank)
        keys, values = by_head.split([spec.nope_dim, spec.v_dim], dim=1)
        return LatentAttention(
            spec=spec,
            layer=layer,
            entry=self.linear(*spec.readers()),
            q_norm=self.norm(spec.q_a_norm),
            q=None if spec.q_a is None else self.linear(spec.q),
            kv_norm=kv_norm,
            keys=keys,
            values=values,
            o=self.outer(spec.o),
            ops=self.ops,
        )

    def cross(self, spec: CrossSpec, layer: int) -> Cross:
        q_norm, k_norm = self.norm(spec.q_norm), self.norm(spec.k_norm)
        assert q_norm is not None and k_norm is not None
        ends = self.linear(spec.q), self.linear(spec.k, spec.v), self.outer(spec.o)
        return Cross(spec, layer, *ends, q_norm, k_norm, self.gate(spec.gate))

    def gate(self, name: str) -> Tensor:
        """A number that multiplies by its tanh."""
        return torch.tanh(self.tensor(name).float()).to(self.place.dtype)

    def conv(self, spec: ConvSpec, silu: bool) -> Conv:
        weight = self.tensor(spec.weight).float().view(spec.channels, spec.kernel)
        bias = None if spec.bias is None else self.tensor(spec.bias).float()
        return Conv(weight, bias, silu, self.ops)

    def short_conv(self, spec: ShortConvSpec, layer: int) -> ShortConv:
        conv = self.conv(spec.conv, silu=False)
        return ShortConv(spec, layer, self.linear(*spec.readers()), conv, self.outer(spec.out))

    def mamba(self, m: MambaSpec, layer: int) -> Mamba:
        return Mamba(
            spec=m,
            layer=layer,
            entry=self.linear(*m.readers()),
            conv=self.conv(m.conv, silu=True),
            fade=-self.tensor(m.a_log).float().exp(),
            dt_bias=self.tensor(m.dt_bias).float(),
            skip=self.tensor(m.skip).float(),
            norm=self.state_norm(m.norm),
            out=self.outer(m.out),
            ops=self.ops,
        )

    def state_norm(self, spec: NormSpec | None) -> Tensor | SpreadNorm | None:
        if spec is None:
            return None
        weight = self.tensor(spec.name).float()
        if spec.spread is None:
            return weight
        assert self.split is not None, spec.name
        return SpreadNorm(spec, weight, None, self.split)

    def delta(self, m: DeltaSpec, layer: int) -> Delta:
        return Delta(
            spec=m,
            layer=layer,
            entry=self.linear(*m.readers()),
            rates=self.linear(*m.routers()),
            conv=self.conv(m.conv, silu=True),
            fade=-self.tensor(m.a_log).float().exp(),
            dt_bias=self.tensor(m.dt_bias).float(),
            norm=self.tensor(m.norm.name).float(),
            out=self.outer(m.out),
            ops=self.ops,
        )

    def attention_options(self, spec: AttentionSpec) -> dict[str, Any]:
        found: dict[str, Any] = {"chunked": True} if spec.chunked else {}
        if spec.block > 1:
            found["block"] = spec.block
        if (alibi := spec.alibi) is not None:
            slopes = torch.tensor(alibi.slopes, dtype=torch.float32, device=self.place.device)
            found |= {"alibi": slopes, "alibi_scale": alibi.scale, "alibi_rounded": alibi.rounded}
        return found

    def cache_scale(self, linear: LinearSpec, name: str) -> float:
        """The scale of a float8 cache that a checkpoint gives beside the attention or its projection, else 1."""
        for base in (linear.name.rpartition(".")[0], linear.name):
            found = self.weights.get(f"{base}.{name}")
            if isinstance(found, Tensor):
                if found.numel() != 1:
                    raise ToolkitError(
                        f"{base}.{name}: expected one number, found shape {list(found.shape)}; "
                        "calibrate the cache per tensor, not per head"
                    )
                scale = float(found)
                if not 0 < scale < float("inf"):
                    raise ToolkitError(f"{base}.{name}: expected a number above 0, found {scale}; calibrate it again")
                return scale
        return 1.0

    def mlp(self, spec: MlpSpec, layer: int = 0) -> Mlp:
        alone = self.mlps((spec,))[0]
        return alone if self.split is None else replace(alone, down=Summed(alone.down, self.split))

    def mlps(self, specs: Sequence[MlpSpec]) -> tuple[Mlp, ...]:
        """Made side by side: a checkpoint may have the same linears of all in one tensor, which is then read once."""
        inner = [self.linear(*spec.readers()) for spec in specs]
        outer = [self.linear(spec.down) for spec in specs]
        return tuple(
            Mlp(
                first,
                down,
                spec.gate is not None,
                spec.activation,
                self.ops,
                spec.gate_scale,
                None if spec.seen is None else self.gate(spec.seen),
                self.head_norm(spec.inner_norm),
                tuple(self.tensor(name) for name in spec.curves()),
            )
            for first, down, spec in zip(inner, outer, specs, strict=True)
        )

    def moe(self, spec: MoeSpec, layer: int) -> Moe:
        return Moe(
            spec=spec,
            **self.experts(spec, layer),
            router=self.linear(spec.router),
            routing=self.routing(spec),
            shared=None if spec.shared is None else self.mlps((spec.shared,))[0],
            shared_gate=None if spec.shared_gate is None else self.linear(spec.shared_gate),
            ops=self.ops,
            split=self.split,
            apart=None if spec.apart is None else self.apart(spec.apart),
            each=None if spec.each is None else self.tensor(spec.each).float(),
        )

    def apart(self, spec: ApartSpec) -> Apart:
        return Apart(*(cast(Norm, self.norm(norm)) for norm in spec.norms()))

    def experts(self, spec: MoeSpec, layer: int) -> dict[str, Any]:
        """Fields of ``Moe``: those that are here, and where all are."""
        stacked = stack_experts(spec, self.matrix, self.info, self.tensor, self.place, self.ops)
        alone = () if stacked is not None else self.mlps(spec.experts)
        return {"stacked": stacked, "experts": alone, "placed": self.placed(spec, layer)}

    def placed(self, spec: MoeSpec, layer: int) -> Placed | None:
        """Where experts are that are not split but shared out."""
        if self.split is None or self.split.seats == 1:
            return None
        count = spec.router.out_features
        return Placed.by(self.split.experts(layer, count), count, self.split, self.place.device)

    def routing(self, spec: MoeSpec) -> dict[str, Any]:
        if not routes_specially(spec):
            return {}
        correction = None if spec.correction is None else self.tensor(spec.correction).float()
        groups = {"groups": spec.groups, "top_groups": spec.top_groups, "group_score": spec.group_score}
        return {"correction": correction, "jitter": spec.jitter, **groups}

    def head(self, spec: DecoderSpec, table: Tensor) -> Linear:
        """The head, in integers where it is stored so in a form of the CUDA kernels (which then give logits in
        float32), else dense. One that is the embedding's matrix (``table``) may have codes of its own.
        """
        place, stored = self.place, self.weights.get(spec.head)
        bias = self.tensor(f"{spec.head}.bias") if spec.head_bias else None
        if isinstance(stored, GroupInt) and not place.dequantize and for_kernels(stored):
            linear = make_linear([stored], [bias], place, self.ops)
            return cast(Linear, replace(linear, wide=True)) if isinstance(linear, PackedLinear) else linear
        own = not spec.tied or isinstance(stored, GroupInt)
        matrix = self.matrix(spec.head).dequantize(place.dtype).to(place.device) if own else table
        return Bound(self.ops.linear, (matrix, None if bias is None else bias.to(place.dtype)))

    def added(self, encoder: EncoderSpec, hidden: int) -> Added:
        found = {name: self.tensor(name).float().view(-1, hidden) for name in encoder.vectors(hidden)}
        positions = None if encoder.positions is None else found[encoder.positions]
        types = None if encoder.types is None else found[encoder.types]
        return Added(positions, encoder.offset, types, self.norm(encoder.norm))

    def steps(self, layer: LayerSpec, index: int) -> list[Step]:
        mixers = [MIXERS[s.mixer.kind](self, s.mixer, index) for s in layer.sublayers]
        found = []
        for i, (s, mixer) in enumerate(zip(layer.sublayers, mixers, strict=True)):
            shares = layer.shares(i)
            norm: Norm | LayerNorm | RoundingNorm | None = None if shares else self.norm(s.pre_norm)
            following = itertools.takewhile(layer.shares, range(i + 1, len(mixers)))
            codes = {_codes_into(m) for m in (mixer, *(mixers[j] for j in following))}
            if isinstance(norm, Norm) and not s.carries and len(codes) == 1 and (only := codes.pop()) is not None:
                norm = RoundingNorm(norm, only)
            post = self.norm(s.post_norm)
            ends = index if i == len(mixers) - 1 else None
            factor = 1.0 if s.factor is None else float(self.tensor(s.factor).float())
            found.append(Step(norm, mixer, post, s.residual_scale, layer.beside(i), shares, ends, s.carries, factor))
        return found


MIXERS: dict[str, Callable[[_Builder, Any, int], Mixer]] = {
    "attention": _Builder.attention,
    "reuse": _Builder.reuse,
    "latent": _Builder.latent,
    "cross": _Builder.cross,
    "short_conv": _Builder.short_conv,
    "mamba": _Builder.mamba,
    "delta": _Builder.delta,
    "mlp": _Builder.mlp,
    "moe": _Builder.moe,
    "per_layer": _Builder.per_layer,
}
"""By kind; called with a mixer's spec and the number of its layer."""


def _codes_into(mixer: Mixer) -> torch.dtype | None:
    """What the mixer rounds its input to, if it takes it rounded."""
    match mixer:
        case Attention():
            return codes_of(mixer.qkv)
        case LatentAttention() | ShortConv() | Mamba():
            return codes_of(mixer.entry)
        case Mlp() if mixer.seen is None:
            return codes_of(mixer.gate_up)
        case Reuse():
            return codes_of(mixer.q)
        case PerLayer():
            return codes_of(mixer.gate)
    return None


def with_experts(
    decoder: Decoder, spec: DecoderSpec, layers: Collection[int], weights: Weights, place: Placement
) -> Decoder:
    """The same decoder with the experts of ``spec`` in some layers."""
    builder = _Builder(weights, place, decoder.ops, (), AdapterStep(0), {}, decoder.split)
    steps, at = list(decoder.steps), 0
    for number, layer in enumerate(spec.layers):
        for sublayer in layer.sublayers:
            step, moe = steps[at], sublayer.mixer
            if number in layers and moe.kind == "moe":
                assert isinstance(step.mixer, Moe)
                mixer = replace(step.mixer, spec=moe, **builder.experts(moe, number))
                steps[at] = replace(step, mixer=mixer)
            at += 1
    return replace(decoder, spec=spec, steps=tuple(steps))


def for_kernels(weight: GroupInt) -> bool:
    """Whether the CUDA kernels take codes of this form, which the others then take too."""
    group, minima = weight.shape[1] // weight.scales.shape[1], weight.minima is not None
    scales = weight.scales.dtype
    return unsupported_form(weight.bits, weight.shape[1], group, minima=minima, scale_dtype=scales) is None


def build_decoder(
    spec: DecoderSpec,
    weights: Weights,
    place: Placement,
    ops: Ops,
    adapters: Adapters = (),
    adapter_step: AdapterStep | None = None,
    split: Split | None = None,
    lender: Decoder | None = None,
    beside: Decoder | None = None,
) -> Decoder:
    """Build a model. Weights are read name by name, in execution order, and not kept.

    ``adapter_step`` says at each step which of ``adapters`` its tokens have. ``split``: the ranks of which this is one,
    whose spec and weights these are. ``lender``: whose embedding and head it has, which ``weights`` need not hold;
    ``beside``: whose cache it reads.
    """
    if adapters:
        scales = scales_of(weights)
        adapters = [fold(adapter, scales) for adapter in adapters]
    routed = () if spec.vision is None else spec.vision.routed
    by_name = {x.linear: x for x in routed}
    builder = _Builder(weights, place, ops, adapters, adapter_step or AdapterStep(0), by_name, split)
    if beside is not None:
        mixers = (step.mixer for step in beside.steps)
        builder.kept = {mixer.layer: mixer for mixer in mixers if isinstance(mixer, Attention)}
    begins, ends = split is None or split.begins, split is None or split.ends
    table = torch.empty(0, spec.hidden_size, dtype=place.dtype, device=place.device)
    if lender is not None:
        table = lender.table
    elif begins or (ends and spec.tied):
        table = builder.matrix(spec.embed).dequantize(place.dtype).to(place.device)
    added = None if spec.encoder is None else builder.added(spec.encoder, spec.hidden_size)
    steps = tuple(step for i, layer in enumerate(spec.layers) for step in builder.steps(layer, i))
    final_norm = builder.norm(spec.final_norm) if ends else None
    head = None if not ends else builder.head(spec, table) if lender is None else lender.head
    given = None if spec.per_layer is None else builder.given(spec.per_layer)
    return Decoder(spec, table, steps, final_norm, head, ops, split, added, given)
