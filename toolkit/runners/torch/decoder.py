"""A decoder built from its spec: plain callables over flat [T, …] tensors, one kernel call after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Weight
from toolkit.errors import ToolkitError
from toolkit.models.spec import AttentionSpec, DecoderSpec, LinearSpec, MlpSpec, MoeSpec, NormSpec, Sublayer
from toolkit.runners.torch.context import StepContext
from toolkit.runners.torch.experts import Experts, stack_experts
from toolkit.runners.torch.linear import (
    Activations,
    Bound,
    Linear,
    Placement,
    Rounded,
    codes_of,
    make_linear,
)
from toolkit.runners.torch.lora import Adapters, AdapterStep, adapt
from toolkit.runners.torch.ops import Ops

Weights = Mapping[str, Weight | Tensor]
Mixer = Callable[[Activations, StepContext], Tensor]


@dataclass(frozen=True)
class Norm:
    """A norm with its weight, float32, offset included."""

    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum in x's dtype, the sum in residual's)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True)
class RoundingNorm:
    """A norm whose results only one W8A8 linear reads: it rounds them to that linear's ``codes`` itself."""

    norm: Norm
    codes: torch.dtype

    def __call__(self, x: Tensor) -> Rounded:
        norm = self.norm
        return Rounded(*norm.ops.rms_norm_quant(x, norm.weight, norm.eps, self.codes))

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Rounded, Tensor]:
        """(rounded norm of the sum, the sum in residual's dtype)."""
        norm = self.norm
        codes, scales, total = norm.ops.add_rms_norm_quant(x, residual, norm.weight, norm.eps, self.codes)
        return Rounded(codes, scales), total


@dataclass(frozen=True)
class Attention:
    """Projections, qk-norm, rope, cache write, attention, output projection.

    ``scales``: what keys and values are divided by in a float8 cache.
    """

    spec: AttentionSpec
    layer: int
    qkv: Linear
    o: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: Tensor | None
    scales: tuple[float, float]
    ops: Ops

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        spec, cache = self.spec, step.cache.layers[self.layer]
        q, k, v = self.qkv(x).unflatten(1, (-1, spec.head_dim)).split([spec.heads, spec.kv_heads, spec.kv_heads], 1)
        eps = next((n.eps for n in (self.q_norm, self.k_norm) if n is not None), 0.0)
        q, q_weight = _norm_later(self.q_norm, q, eps)
        k, k_weight = _norm_later(self.k_norm, k, eps)
        cos, sin = (None, None) if spec.rope is None else step.rope[spec.rope]
        scales = self.scales if cache.is_float8 else (1.0, 1.0)
        q = self.ops.rope_kv_write(
            q,
            k,
            v,
            cache.k,
            cache.v,
            step.slots[spec.group],
            cos,
            sin,
            q_weight,
            k_weight,
            eps,
            cache.bits,
            cache.k_params,
            cache.v_params,
            *scales,
        )
        y = self.ops.paged_attention(
            q,
            cache.k,
            cache.v,
            step.batch.block_tables[spec.group],
            step.batch.cu_seqlens,
            step.batch.seq_lens,
            spec.scale,
            spec.window,
            spec.softcap,
            self.sinks,
            cache.bits,
            cache.k_params,
            cache.v_params,
            step.plans[spec.group, spec.window],
            *scales,
            turned=True,
        )
        return self.o(y.flatten(1))


def _norm_later(norm: Norm | None, x: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """(heads, weight of the norm that ``rope_kv_write`` applies); what it cannot do is done here: other ``eps``, and a
    norm over all heads at once, whose weight spans them.
    """
    if norm is None:
        return x, None
    if norm.weight.shape[0] != x.shape[-1]:
        return norm(x.flatten(1)).view(x.shape), None
    return (x, norm.weight) if norm.eps == eps else (norm(x), None)


@dataclass(frozen=True)
class Mlp:
    """``gate_up`` gives gate then up; without a gate it is up alone."""

    gate_up: Linear
    down: Linear
    gated: bool
    activation: str
    ops: Ops

    def __call__(self, x: Activations, step: StepContext | None = None) -> Tensor:
        inner = self.gate_up(x)
        codes = codes_of(self.down)
        if self.gated and codes is not None:
            return self.down(Rounded(*self.ops.act_and_mul_quant(inner, self.activation, codes)))
        act = self.ops.act_and_mul if self.gated else self.ops.act
        return self.down(act(inner, self.activation))


@dataclass(frozen=True)
class Moe:
    """Router, experts (run together where they can be stacked, one ``Mlp`` each where not) and shared expert."""

    spec: MoeSpec
    router: Linear
    stacked: Experts | None
    experts: tuple[Mlp, ...]
    shared: Mlp | None
    shared_gate: Linear | None
    ops: Ops

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        assert isinstance(x, Tensor), "the router and the experts read the same input"
        spec = self.spec
        chosen, weights = self.ops.moe_route(self.router(x), spec.top_k, spec.scoring, spec.norm_topk, spec.scale)
        if self.stacked is not None:
            y = self.stacked(x, chosen, weights)
        else:
            y = self._one_by_one(x, chosen, weights)
        if self.shared is not None:
            extra = self.shared(x)
            if self.shared_gate is not None:
                extra = extra * torch.sigmoid(self.shared_gate(x).float()).to(x.dtype)
            y = y + extra
        return y

    def _one_by_one(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in chosen.unique().tolist():
            rows, slot = (chosen == e).nonzero(as_tuple=True)
            total.index_add_(0, rows, self.experts[e](x[rows]).float() * weights[rows, slot, None])
        return total.to(x.dtype)


@dataclass(frozen=True)
class Step:
    """A sublayer: norm, mixer, norm, scale."""

    pre_norm: Norm | RoundingNorm | None
    mixer: Mixer
    post_norm: Norm | None
    scale: float


@dataclass(frozen=True)
class Decoder:
    """Embedding, sublayers of all layers in order, final norm and head."""

    spec: DecoderSpec
    table: Tensor
    steps: tuple[Step, ...]
    final_norm: Norm
    head: Linear
    ops: Ops

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        return self.ops.embedding(ids, self.table, self.spec.embed_scale)

    def run(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """All layers. The result is the sum of both tensors, the last addition left to the final norm.

        The sum is kept in float32 from layer to layer: in bfloat16 its roundings are what costs most accuracy.
        """
        delta: Tensor | None = None
        dtype = x.dtype
        for s in self.steps:
            h: Activations
            if delta is None:
                h = x if s.pre_norm is None else s.pre_norm(x)
                x = x.float()
            elif s.pre_norm is None:
                x = x + delta
                h = x.to(dtype)
            else:
                h, x = s.pre_norm.after_add(delta, x)
            delta = s.mixer(h, step)
            if s.post_norm is not None:
                delta = s.post_norm(delta)
            if s.scale != 1.0:
                delta = delta * s.scale
        return x, delta

    def hidden(self, x: Tensor, delta: Tensor | None, rows: Tensor | None) -> Tensor:
        """Final hidden states of flat tokens ``rows`` (None = all)."""
        if rows is not None:
            x = x.index_select(0, rows)
            delta = None if delta is None else delta.index_select(0, rows)
        return self.final_norm(x) if delta is None else self.final_norm.after_add(delta, x)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, V]; a tensor of its own."""
        logits = self.head(hidden).float()
        if self.spec.head_scale != 1.0:
            logits *= self.spec.head_scale
        if self.spec.logit_softcap is not None:
            logits.div_(self.spec.logit_softcap).tanh_().mul_(self.spec.logit_softcap)
        return logits


class _Builder:
    """Turns a spec and its weights into callables."""

    def __init__(
        self, weights: Weights, place: Placement, ops: Ops, adapters: Adapters, adapter_step: AdapterStep
    ) -> None:
        self.weights, self.place, self.ops = weights, place, ops
        self.adapters, self.adapter_step = adapters, adapter_step

    def tensor(self, name: str) -> Tensor:
        found = self.weights[name]
        assert isinstance(found, Tensor), name
        return found.to(self.place.device)

    def matrix(self, name: str) -> Weight:
        found = self.weights[name]
        assert not isinstance(found, Tensor), name
        return found

    def linear(self, *specs: LinearSpec) -> Linear:
        pairs = [(self.matrix(s.name), self.tensor(f"{s.name}.bias") if s.bias else None) for s in specs]
        base = make_linear([w for w, _ in pairs], [b for _, b in pairs], self.place, self.ops)
        return adapt(base, specs, self.adapters, self.adapter_step, self.place, self.ops)

    def norm(self, spec: NormSpec | None) -> Norm | None:
        if spec is None:
            return None
        return Norm(self.tensor(spec.name).float() + spec.weight_offset, spec.eps, self.ops)

    def attention(self, spec: AttentionSpec, layer: int) -> Attention:
        return Attention(
            spec=spec,
            layer=layer,
            qkv=self.linear(spec.q, spec.k, spec.v),
            o=self.linear(spec.o),
            q_norm=self.norm(spec.q_norm),
            k_norm=self.norm(spec.k_norm),
            sinks=None if spec.sinks is None else self.tensor(spec.sinks).float(),
            scales=(self.cache_scale(spec.k, "k_scale"), self.cache_scale(spec.v, "v_scale")),
            ops=self.ops,
        )

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

    def mlp(self, spec: MlpSpec) -> Mlp:
        first = [spec.up] if spec.gate is None else [spec.gate, spec.up]
        return Mlp(self.linear(*first), self.linear(spec.down), spec.gate is not None, spec.activation, self.ops)

    def moe(self, spec: MoeSpec) -> Moe:
        stacked = stack_experts(spec, self.matrix, self.place, self.ops)
        return Moe(
            spec=spec,
            router=self.linear(spec.router),
            stacked=stacked,
            experts=() if stacked is not None else tuple(self.mlp(e) for e in spec.experts),
            shared=None if spec.shared is None else self.mlp(spec.shared),
            shared_gate=None if spec.shared_gate is None else self.linear(spec.shared_gate),
            ops=self.ops,
        )

    def mixer(self, sublayer: Sublayer, layer: int) -> Mixer:
        m = sublayer.mixer
        if isinstance(m, AttentionSpec):
            return self.attention(m, layer)
        return self.mlp(m) if isinstance(m, MlpSpec) else self.moe(m)

    def step(self, s: Sublayer, layer: int) -> Step:
        mixer, pre_norm = self.mixer(s, layer), self.norm(s.pre_norm)
        first = mixer.qkv if isinstance(mixer, Attention) else mixer.gate_up if isinstance(mixer, Mlp) else None
        codes = None if first is None else codes_of(first)
        before = pre_norm if pre_norm is None or codes is None else RoundingNorm(pre_norm, codes)
        return Step(before, mixer, self.norm(s.post_norm), s.residual_scale)


def build_decoder(
    spec: DecoderSpec,
    weights: Weights,
    place: Placement,
    ops: Ops,
    adapters: Adapters = (),
    adapter_step: AdapterStep | None = None,
) -> Decoder:
    """Build a model. Weights are read name by name, in execution order, and not kept.

    ``adapter_step`` says at each step which of ``adapters`` its tokens have.
    """
    builder = _Builder(weights, place, ops, adapters, adapter_step or AdapterStep(0))
    table = builder.matrix(spec.embed).dequantize(place.dtype).to(place.device)
    steps = tuple(builder.step(s, i) for i, layer in enumerate(spec.layers) for s in layer.sublayers)
    final_norm = builder.norm(spec.final_norm)
    assert final_norm is not None
    bias = builder.tensor(f"{spec.head}.bias").to(place.dtype) if spec.head_bias else None
    matrix = table if spec.tied else builder.matrix(spec.head).dequantize(place.dtype).to(place.device)
    return Decoder(spec, table, steps, final_norm, Bound(ops.linear, (matrix, bias)), ops)
