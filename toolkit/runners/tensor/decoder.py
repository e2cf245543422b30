"""A decoder as plain callables over flat [T, …] tensors, one kernel call after another; ``build`` makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.reference.activation import xielu
from toolkit.models.spec import AttentionSpec, DecoderSpec, MoeSpec
from toolkit.runners.tensor.cache import LayerCache
from toolkit.runners.tensor.layers.cross import Cross, seeing
from toolkit.runners.tensor.layers.experts import Experts
from toolkit.runners.tensor.layers.linear import Activations, Linear, Rounded, codes_of
from toolkit.runners.tensor.layers.mutual import see_both_ways, see_whole_texts
from toolkit.runners.tensor.layers.norms import LayerNorm, Norm, SpreadNorm, norm_later, spread_norms
from toolkit.runners.tensor.layers.per_layer import Given
from toolkit.runners.tensor.layers.placed import Placed
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.split import Split, Summed, own_rows
from toolkit.runners.tensor.step.context import StepContext

NEVER = -1e30  # the logit of a token that the head has no row for
Mixer = Callable[[Activations, StepContext], Tensor]


@dataclass(frozen=True)
class RoundingNorm:
    """An RMS norm whose results only one W8A8 linear reads: it rounds them to that linear's ``codes`` itself."""

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
    """Projections, qk-norm and rope, cache write, attention, output projection.

    ``qkv`` gives the gate too, where there is one.
    ``more``: of ``paged_attention``, what most models leave as it is. ``scales``: what keys and values are divided by
    in a float8 cache. ``bias``: rows of ``spec.position_bias``.
    """

    spec: AttentionSpec
    layer: int
    qkv: Linear
    o: Linear
    q_norm: Norm | LayerNorm | SpreadNorm | None
    k_norm: Norm | LayerNorm | SpreadNorm | None
    v_norm: Norm | LayerNorm | None
    o_norm: Norm | LayerNorm | SpreadNorm | None
    sinks: Tensor | None
    more: Mapping[str, Any]
    scales: tuple[float, float]
    ops: Ops
    bias: Tensor | None = None

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        q, gate = self.write(x, step)
        if self.spec.q_scale is not None:
            q = (q * step.q_scales[self.spec.q_scale]).to(q.dtype)
        y = self.find(q, step, turned=True).flatten(1)
        y = y if gate is None else y * torch.sigmoid(gate)
        return self.o(y if self.o_norm is None else self.o_norm(y))

    def write(self, x: Activations, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """Keys and values into the cache. Returns queries [T, heads, head_dim] and the gate, where there is one."""
        spec, cache = self.spec, step.cache.layers[self.layer, self.spec.group]
        qkv, gate = self.qkv(x), None
        if spec.gate is not None:
            qkv, gate = qkv.tensor_split((qkv.shape[1] - spec.gate.out_features,), 1)
        qkv = qkv if spec.clip is None else qkv.clamp(-spec.clip, spec.clip)
        heads = qkv.unflatten(1, (-1, spec.head_dim))
        q, k, v = heads[:, : spec.heads], heads[:, spec.heads :][:, : spec.kv_heads], heads[:, -spec.kv_heads :]
        cos, sin = (None, None) if spec.rope is None else step.rope[spec.rope]
        if spec.norm_last and cos is not None:
            q, k, cos, sin = self.ops.rope(q, cos, sin), self.ops.rope(k, cos, sin), None, None
        q_norm, k_norm = self.q_norm, self.k_norm
        if isinstance(q_norm, SpreadNorm):
            k_spread = isinstance(k_norm, SpreadNorm)  # else it is over one head of keys, which every rank has
            pairs = [(q_norm, q.flatten(1)), *([(k_norm, k.flatten(1))] if isinstance(k_norm, SpreadNorm) else [])]
            q, *others = (y.unflatten(1, (-1, spec.head_dim)) for y in spread_norms(pairs))
            q_norm, k, k_norm = None, others[0] if k_spread else k, None if k_spread else k_norm
        assert not isinstance(k_norm, SpreadNorm), "keys are normed over all heads where queries are"
        eps = next((n.eps for n in (q_norm, k_norm) if isinstance(n, Norm)), 0.0)
        q, q_weight = norm_later(q_norm, q, eps)
        k, k_weight = norm_later(k_norm, k, eps)
        v = v if self.v_norm is None else self.v_norm(v)
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
        return q, gate

    def find(self, q: Tensor, step: StepContext, turned: bool = False) -> Tensor:
        """What queries [T, heads, head_dim], also those of another layer, find in this one's cache; ``turned``: as
        ``paged_attention`` has it."""
        spec, cache = self.spec, step.cache.layers[self.layer, self.spec.group]
        scales = self.scales if cache.is_float8 else (1.0, 1.0)
        if spec.mutual:
            y = see_whole_texts(q, cache, step, spec, scales, self.bias)
        else:
            y = self._attend(q, cache, step, scales, turned)
        if len(step.batch.mutual) and not spec.strict:
            see_both_ways(y, q, cache, step.batch, spec, scales)
        return y

    def _attend(
        self, q: Tensor, cache: LayerCache, step: StepContext, scales: tuple[float, float], turned: bool
    ) -> Tensor:
        spec = self.spec
        return self.ops.paged_attention(
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
            turned=turned,
            **self.more,
        )


@dataclass(frozen=True)
class Mlp:
    """``gate_up`` gives gate then up; without a gate it is up alone. ``scale``: of the gate. ``seen``: what multiplies
    the rows of tokens that see pictures; others are 0.
    """

    gate_up: Linear
    down: Linear
    gated: bool
    activation: str
    ops: Ops
    scale: float = 1.0
    seen: Tensor | None = None
    norm: Norm | LayerNorm | SpreadNorm | None = None  # of what ``down`` reads
    curve: tuple[Tensor, ...] = ()  # of xielu

    def __call__(self, x: Activations, step: StepContext | None = None) -> Tensor:
        if self.seen is None:
            return self._run(x)
        assert isinstance(x, Tensor), "no norm rounds for it"
        if step is None or not step.views:
            return torch.zeros_like(x)
        return self._run(x) * (self.seen * seeing(x, step))

    def _run(self, x: Activations) -> Tensor:
        inner = self.gate_up(x)
        if self.scale != 1.0:
            gate, up = inner.chunk(2, 1)
            inner = torch.cat([gate * self.scale, up], 1)
        codes = codes_of(self.down.linear if isinstance(self.down, Summed) else self.down)
        if self.gated and codes is not None and self.norm is None:
            return self.down(Rounded(*self.ops.act_and_mul_quant(inner, self.activation, codes)))
        act = self.ops.act_and_mul if self.gated else self.ops.act
        made = xielu(inner, *self.curve) if self.curve else act(inner, self.activation)
        return self.down(made if self.norm is None else self.norm(made))


@dataclass(frozen=True)
class Apart:
    """Of a mixture beside an MLP: see the spec's."""

    router: Norm | LayerNorm
    experts: Norm | LayerNorm
    shared: Norm | LayerNorm
    experts_out: Norm | LayerNorm
    shared_out: Norm | LayerNorm


@dataclass(frozen=True)
class Moe:
    """Router, experts (run together where they can be stacked, one ``Mlp`` each where not) and shared expert.

    ``routing``: of ``moe_route``, what most models leave as it is.
    """

    spec: MoeSpec
    router: Linear
    routing: Mapping[str, Any]
    stacked: Experts | None
    experts: tuple[Mlp, ...]
    shared: Mlp | None
    shared_gate: Linear | None
    ops: Ops
    split: Split | None = None  # where every rank has a part of all experts
    placed: Placed | None = None  # where it has some of them whole, which ``stacked`` or ``experts`` are
    apart: Apart | None = None
    each: Tensor | None = None  # float32, of each expert what its weight is multiplied by

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        assert isinstance(x, Tensor), "the router and the experts read the same input"
        apart = self.apart
        if apart is None:
            routed, extra = self._mixed(x, x, step), self._shared(x)
            y = routed if extra is None else routed + extra
            return y if self.split is None else self.split.sum(y)
        routed, extra = self._mixed(apart.router(x), apart.experts(x), step), self._shared(apart.shared(x))
        assert extra is not None, "norms of their own are of experts beside an MLP"
        if self.split is not None:
            routed, extra = self.split.sum(torch.stack([routed, extra])).unbind()
        return apart.experts_out(routed) + apart.shared_out(extra)

    def _shared(self, x: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        extra = self.shared(x)
        if self.shared_gate is not None:
            extra = extra * torch.sigmoid(self.shared_gate(x).float()).to(x.dtype)
        return extra

    def _mixed(self, read: Tensor, x: Tensor, step: StepContext) -> Tensor:
        """What experts make of ``x``, chosen by what the router reads."""
        spec, logits = self.spec, self.router(read)
        logits = logits if spec.logit_scale == 1.0 else logits * spec.logit_scale
        first = logits, spec.top_k, spec.scoring, spec.norm_topk, spec.scale
        chosen, weights = self.ops.moe_route(*first, **self.routing)
        if self.each is not None:
            weights = weights * self.each[chosen]
        if step.routes is not None:
            step.routes.append((chosen, weights))
        if spec.weigh_input:  # a row for every choice, and each row one choice
            rows = (x[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)
            y = self._routed(rows, chosen.reshape(-1, 1), weights.new_ones(len(rows), 1))
            return y.view(len(x), spec.top_k, -1).sum(1)
        return self._routed(x, chosen, weights)

    def _routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        run = self._one_by_one if self.stacked is None else self.stacked
        return run(x, chosen, weights) if self.placed is None else self.placed(x, chosen, weights, run)

    def idle(self, x: Tensor) -> None:
        """Take part in a step that has no tokens here: other ranks' tokens may want experts of this one. ``x``: [0,
        hidden]."""
        if self.placed is not None:
            self._routed(
                x, torch.zeros(0, self.spec.top_k, dtype=torch.int64, device=x.device), x.new_zeros(0, self.spec.top_k)
            )

    def _one_by_one(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in chosen.unique().tolist():
            rows, slot = (chosen == e).nonzero(as_tuple=True)
            total.index_add_(0, rows, self.experts[e](x[rows]).float() * weights[rows, slot, None])
        return total.to(x.dtype)


@dataclass(frozen=True)
class Step:
    """A sublayer: norm, mixer, norm, scale. ``beside``: it reads what the one before it read, the same norm of it where
    ``shares``. ``ends``: the number of the layer that it is the last of. ``carries``: what the first norm gives
    takes the place of the stream. ``factor`` multiplies the stream behind it.
    """

    pre_norm: Norm | LayerNorm | RoundingNorm | None
    mixer: Mixer
    post_norm: Norm | LayerNorm | None
    scale: float
    beside: bool = False
    shares: bool = False
    ends: int | None = None
    carries: bool = False
    factor: float = 1.0


@dataclass(frozen=True)
class Added:
    """What is added to embeddings: rows by position and by type, [rows, hidden]; and the norm of the sum."""

    positions: Tensor | None
    offset: int
    types: Tensor | None
    norm: Norm | LayerNorm | None = None

    def __call__(self, x: Tensor, places: Tensor, types: Tensor | None) -> Tensor:
        """``x`` [T, hidden] of tokens at ``places`` [T], of the first of two types where ``types`` is None."""
        total = x.float()
        if self.types is not None:
            total = total + (self.types[0] if types is None else self.types[types])
        if self.positions is not None:
            total = total + self.positions[places + self.offset]
        return (total if self.norm is None else self.norm(total)).to(x.dtype)


@dataclass(frozen=True)
class Decoder:
    """Embedding, sublayers of all layers in order, final norm and head."""

    spec: DecoderSpec
    table: Tensor
    steps: tuple[Step, ...]
    final_norm: Norm | LayerNorm | None  # None, as ``head``: other ranks have the last layers
    head: Linear | None
    ops: Ops
    split: Split | None = None  # where ``table`` and ``head`` are one rank's part
    added: Added | None = None
    given: Given | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        if self.split is None:
            return self.ops.embedding(ids, self.table, self.spec.embed_scale)
        rows, others = own_rows(ids, self.split)
        found = self.ops.embedding(rows, self.table, self.spec.embed_scale)
        return self.split.sum(found.masked_fill(others, 0))

    def run(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """All layers. The result is the sum of both tensors, the last addition left to the final norm.

        The sum is kept in float32 from layer to layer: in bfloat16 its roundings are what costs most accuracy.
        Where other ranks have the layers before, ``x`` is that sum.
        """
        dtype = self.table.dtype
        delta = None if self.split is None or self.split.begins else torch.zeros(x.shape, dtype=dtype, device=x.device)
        h: Activations = x
        if self.given is not None:
            assert step.ids is not None, "the layers are given rows by token"
            step.given = self.given(x, step.ids)
        step.tap(0, x, delta)
        for s in self.steps:
            beside = delta if s.beside else None  # of the sublayers that read what this one reads
            if s.beside:
                if not s.shares:
                    h = x if s.pre_norm is None else s.pre_norm(x)
                    h = h.to(dtype) if isinstance(h, Tensor) else h
            elif delta is None:
                h = x if s.pre_norm is None else s.pre_norm(x)
                x = x.float()
            elif s.pre_norm is None:
                x = x + delta
                h = x.to(dtype)
            else:
                h, x = s.pre_norm.after_add(delta, x)
            if s.carries:
                assert isinstance(h, Tensor), "no norm rounds for it"
                x = h.float()
            delta = s.mixer(h, step)
            if s.post_norm is not None:
                delta = s.post_norm(delta)
            if s.scale != 1.0:
                delta = delta * s.scale
            if beside is not None:
                delta = delta + beside
            if s.factor != 1.0:
                x, delta = x * s.factor, delta * s.factor
            if s.ends is not None and s.ends < len(step.deep) and step.deep_index is not None:
                x = x.index_add(0, step.deep_index, step.deep[s.ends].float())
            if s.ends is not None:
                step.tap(s.ends + 1, x, delta)
        return x, delta

    def fill(self, x: Tensor, step: StepContext) -> None:
        """Keys and values of all layers, made of ``x`` [T, hidden] each."""
        for s in self.steps:
            if isinstance(s.mixer, Attention):
                s.mixer.write(x, step)

    def idle(self) -> None:
        """Take part in a step that has no tokens here."""
        x = self.table.new_zeros(0, self.spec.hidden_size)
        for s in self.steps:
            if isinstance(s.mixer, Moe):
                s.mixer.idle(x)

    def placed(self) -> Iterator[tuple[int, Placed]]:
        """Layers, by number, with whole experts on ranks."""
        mixers = iter(self.steps)
        for layer, spec in enumerate(self.spec.layers):
            for _ in spec.sublayers:
                mixer = next(mixers).mixer
                if isinstance(mixer, Moe) and mixer.placed is not None:
                    yield layer, mixer.placed

    def remember(self, rows: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """What cross layers keep of a picture's ``rows`` [rows, hidden], by the number of the layer."""
        return {s.mixer.layer: s.mixer.remember(rows) for s in self.steps if isinstance(s.mixer, Cross)}

    def hidden(self, x: Tensor, delta: Tensor | None, rows: Tensor | None) -> Tensor:
        """Final hidden states of flat tokens ``rows`` (None = all)."""
        if rows is not None:
            x = x.index_select(0, rows)
            delta = None if delta is None else delta.index_select(0, rows)
        assert self.final_norm is not None, "the last layers are not here"
        return self.final_norm(x) if delta is None else self.final_norm.after_add(delta, x)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, V]; a tensor of its own."""
        assert self.head is not None, "the last layers are not here"
        found = self.head(hidden)
        logits = (found if self.split is None else self.split.head(found)).float()
        if self.spec.head_scale != 1.0:
            logits *= self.spec.head_scale
        if self.spec.logit_softcap is not None:
            logits.div_(self.spec.logit_softcap).tanh_().mul_(self.spec.logit_softcap)
        if self.spec.head_rows:
            more = self.spec.vocab_size - self.spec.head_rows
            logits = torch.nn.functional.pad(logits, (0, more), value=NEVER)
        return logits
