"""Hypothesis strategies: small valid specs with every feature that a spec can have, and weights for them.

``specs(quantized=False)``: a strategy of ``DecoderSpec``; ``any_spec(draw)``: one of them, drawn otherwise. With
``quantized`` all experts of a token are chosen, for what rounding does to a router's choice is no fault.
``weights(spec, form, seed)``: canonical weights, the linears of the layers "dense", "int4" (groups of 16), "int8" (a
scale a row) or "mixed", each as chance has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from toolkit.artifacts.canonical import Dense, GroupInt
from toolkit.artifacts.rounding import to_channel_int8, to_group_int
from toolkit.models.config.dims import Dims
from toolkit.models.decoder import assemble
from toolkit.models.spec import (
    AlibiSpec,
    Apart,
    AttentionSpec,
    ConvSpec,
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
    QueryScale,
    ReuseSpec,
    RopeSpec,
    ShortConvSpec,
    Sublayer,
)
from toolkit.models.spec.check import check_spec

VOCAB, LENGTH = 96, 40
Draw = Callable[[Sequence[Any]], Any]  # one of several
BOTH = (False, True)
FORMS = ("dense", "int4", "int8", "mixed")
_HEADS = ((1, 1, 32), (2, 1, 16), (4, 2, 24), (4, 4, 16), (6, 2, 8), (3, 1, 48))  # heads, kv heads, numbers a head


def _ropes(original: int) -> tuple[RopeSpec, ...]:
    """One of each kind; those with two sets of frequencies turn texts beyond ``original`` tokens by the second."""
    dynamic = RopeSpec(8, 1e4, "dynamic", 2.0, original, max_position=256)
    factors: dict[str, Any] = {"short_factor": (1.0, 1.1, 1.3, 2.0), "long_factor": (1.0, 1.5, 2.5, 4.0)}
    return (
        RopeSpec(8, 1e4),
        RopeSpec(8, 1e4, sections=(1, 2, 1)),
        RopeSpec(8, 1e4, sections=(2, 1, 1), woven=True),
        RopeSpec(8, 1e4, "linear", 2.0),
        RopeSpec(8, 1e4, "proportional", 1.5, turning=3),
        RopeSpec(6, 1e4, "yarn", 4.0, 16, attention_factor=1.2, truncate=False, beta_fast=16.0, beta_slow=2.0),
        RopeSpec(8, 5e3, "llama3", 8.0, 16, low_freq_factor=1.5, high_freq_factor=3.0),
        dynamic,
        replace(dynamic, kind="longrope", factor=1.0, attention_factor=1.1, long_attention_factor=1.3, **factors),
    )


def is_long(spec: Any, length: int) -> bool:
    """Whether texts of ``length`` tokens turn by the second set of frequencies."""
    return any(r.kind in ("dynamic", "longrope") and r.original_max_position < length for r in spec.ropes())


def _norm(draw: Draw, name: str, size: int, heads: int = 1) -> NormSpec:
    kind = draw(("rms", "layer"))
    eps = draw((1e-6, 1e-5))
    if kind == "rms":
        return NormSpec(name, size, eps, draw((0.0, 1.0)))
    return NormSpec(name, size, eps, draw((0.0, 1.0)), kind="layer", bias=draw(BOTH), heads=heads)


def _maybe_norm(draw: Draw, name: str, size: int) -> NormSpec | None:
    return _norm(draw, name, size) if draw(BOTH) else None


def _head_norm(draw: Draw, name: str, heads: int, head_dim: int) -> NormSpec | None:
    span = draw((None, "each", "own", "all"))
    if span is None:
        return None
    if span == "each" and draw(range(4)) == 0:
        return NormSpec(name, head_dim, 1e-6, weight=False)
    return _norm(draw, name, heads * head_dim if span == "all" else head_dim, heads if span == "own" else 1)


def _attention(draw: Draw, prefix: str, hidden: int, ropes: Sequence[RopeSpec], rare: bool) -> AttentionSpec:
    heads, kv, dim = draw(_HEADS)
    bias, window = draw(BOTH), draw((None, 7, 16))
    alibi = None
    if draw(range(4)) == 0:
        slopes = tuple(2.0 ** -(h + 1) for h in range(heads))
        alibi = AlibiSpec(slopes, *draw(((), (0.5, True))))
    return AttentionSpec(
        q=LinearSpec(f"{prefix}.q_proj", hidden, heads * dim, bias),
        k=LinearSpec(f"{prefix}.k_proj", hidden, kv * dim, bias),
        v=LinearSpec(f"{prefix}.v_proj", hidden, kv * dim, bias),
        o=LinearSpec(f"{prefix}.o_proj", heads * dim, hidden, draw(BOTH)),
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        scale=draw((dim**-0.5, 0.1)),
        rope=draw((None, *ropes)),
        q_norm=_head_norm(draw, f"{prefix}.q_norm", heads, dim),
        k_norm=_head_norm(draw, f"{prefix}.k_norm", kv, dim),
        window=window,
        chunked=window is not None and draw(BOTH),
        softcap=None if alibi is not None else draw((None, 5.0)),
        alibi=alibi,
        sinks=f"{prefix}.sinks" if alibi is None and draw(BOTH) else None,
        clip=draw((None, None, 0.8)),
        norm_last=draw(BOTH),
        q_scale=draw((None, None, QueryScale("floor", 8, 0.5, 1), QueryScale("log", 12))),
        gate=LinearSpec(f"{prefix}.g_proj", hidden, heads * dim, bias) if rare and draw(BOTH) else None,
        v_norm=draw((None, None, NormSpec(f"{prefix}.v_norm", dim, 1e-6, weight=False))),
        o_norm=_norm(draw, f"{prefix}.o_norm", heads * dim) if draw(range(4)) == 0 else None,
    )


def _latent(draw: Draw, prefix: str, hidden: int, ropes: Sequence[RopeSpec]) -> LatentSpec:
    heads, nope, turned, v, rank = draw(((4, 4, 8, 4, 32), (3, 8, 16, 32, 48), (1, 24, 8, 48, 16)))
    q_rank = draw((None, 32))
    bias = draw(BOTH)
    return LatentSpec(
        q_a=None if q_rank is None else LinearSpec(f"{prefix}.q_a_proj", hidden, q_rank, bias),
        q_a_norm=None if q_rank is None else NormSpec(f"{prefix}.q_a_layernorm", q_rank, 1e-6),
        q=LinearSpec(f"{prefix}.q_b_proj", q_rank or hidden, heads * (nope + turned)),
        kv_a=LinearSpec(f"{prefix}.kv_a_proj", hidden, rank + turned, bias),
        kv_a_norm=NormSpec(f"{prefix}.kv_a_layernorm", rank, 1e-6),
        kv_b=LinearSpec(f"{prefix}.kv_b_proj", rank, heads * (nope + v)),
        o=LinearSpec(f"{prefix}.o_proj", heads * v, hidden, bias),
        heads=heads,
        nope_dim=nope,
        rope_dim=turned,
        v_dim=v,
        kv_rank=rank,
        scale=draw(((nope + turned) ** -0.5, 0.1)),
        rope=draw(ropes),
    )


def _conv(draw: Draw, prefix: str, channels: int) -> ConvSpec:
    bias = f"{prefix}.bias" if draw(BOTH) else None
    return ConvSpec(f"{prefix}.weight", bias, channels, draw((2, 3, 4)))


def _short_conv(draw: Draw, prefix: str, hidden: int) -> ShortConvSpec:
    inner, bias = draw((32, 48)), draw(BOTH)
    b, c, x = (LinearSpec(f"{prefix}.{name}_proj", hidden, inner, bias) for name in "bcx")
    out = LinearSpec(f"{prefix}.out_proj", inner, hidden, draw(BOTH))
    return ShortConvSpec(b, c, x, _conv(draw, f"{prefix}.conv", inner), out)


def _mamba(draw: Draw, prefix: str, hidden: int) -> MambaSpec:
    heads, groups, dim, size = draw(((4, 1, 16, 8), (4, 2, 8, 16), (3, 3, 16, 4)))
    width, inner, bias = heads * dim, heads * dim + 2 * groups * size, draw(BOTH)
    return MambaSpec(
        z=LinearSpec(f"{prefix}.z_proj", hidden, width, bias),
        inner=LinearSpec(f"{prefix}.x_proj", hidden, inner, bias),
        dt=LinearSpec(f"{prefix}.dt_proj", hidden, heads, bias),
        conv=_conv(draw, f"{prefix}.conv", inner),
        a_log=f"{prefix}.A_log",
        dt_bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        norm=NormSpec(f"{prefix}.norm", width, 1e-5) if draw(BOTH) else None,
        out=LinearSpec(f"{prefix}.out_proj", width, hidden, bias),
        heads=heads,
        head_dim=dim,
        groups=groups,
        state_size=size,
        least=draw((0.0, 0.3)),
        norm_first=draw(BOTH),
        scales=draw(((), (0.5, 2.0, 1.5, 0.7, 0.3))),
    )


def _delta(draw: Draw, prefix: str, hidden: int) -> DeltaSpec:
    keys, k_dim, heads, v_dim = draw(((2, 8, 4, 16), (3, 16, 3, 16), (1, 16, 2, 8)))
    inner, bias = 2 * keys * k_dim + heads * v_dim, draw(BOTH)
    return DeltaSpec(
        qkv=LinearSpec(f"{prefix}.in_proj_qkv", hidden, inner, bias),
        z=LinearSpec(f"{prefix}.in_proj_z", hidden, heads * v_dim, bias),
        beta=LinearSpec(f"{prefix}.in_proj_b", hidden, heads, bias),
        fade=LinearSpec(f"{prefix}.in_proj_a", hidden, heads, bias),
        conv=_conv(draw, f"{prefix}.conv", inner),
        a_log=f"{prefix}.A_log",
        dt_bias=f"{prefix}.dt_bias",
        norm=NormSpec(f"{prefix}.norm", v_dim, 1e-6),
        out=LinearSpec(f"{prefix}.out_proj", heads * v_dim, hidden, bias),
        k_heads=keys,
        k_dim=k_dim,
        heads=heads,
        v_dim=v_dim,
    )


def _mlp(draw: Draw, prefix: str, hidden: int, inner: int, like: MlpSpec | None = None) -> MlpSpec:
    if like is None:
        gated, bias = draw(BOTH), draw(BOTH)
        kinds = ("silu", "gelu", "gelu_tanh", "relu", *(("swigluoai",) if gated else ()))
        activation = draw(kinds)
    else:
        gated, bias, activation = like.gate is not None, like.up.bias, like.activation
    return MlpSpec(
        gate=LinearSpec(f"{prefix}.gate_proj", hidden, inner, bias) if gated else None,
        up=LinearSpec(f"{prefix}.up_proj", hidden, inner, bias),
        down=LinearSpec(f"{prefix}.down_proj", inner, hidden, bias),
        activation=activation,
    )


def _moe(draw: Draw, prefix: str, hidden: int, quantized: bool) -> MoeSpec:
    count, inner = draw((1, 2, 3, 4, 6)), draw((32, 48))
    first = _mlp(draw, f"{prefix}.experts.0", hidden, inner)
    rest = (_mlp(draw, f"{prefix}.experts.{e}", hidden, inner, first) for e in range(1, count))
    shared = _mlp(draw, f"{prefix}.shared", hidden, 64) if draw(BOTH) else None
    gate = LinearSpec(f"{prefix}.shared_gate", hidden, 1) if shared is not None and draw(BOTH) else None
    routing = _routing(draw, prefix, count, quantized)
    return MoeSpec(
        router=LinearSpec(f"{prefix}.gate", hidden, count, draw(BOTH)),
        experts=(first, *rest),
        **routing,
        scale=draw((1.0, 1.5)),
        shared=shared,
        shared_gate=gate,
        weigh_input=draw((False, False, True)),
        logit_scale=draw((1.0, 0.5)),
        each=draw((None, f"{prefix}.each")),
    )


def _apart(draw: Draw, prefix: str, hidden: int, moe: MoeSpec) -> MoeSpec:
    """Beside an MLP, each with norms of its own."""
    norms = (_norm(draw, f"{prefix}.{name}", hidden) for name in ("router", "in", "shared_in", "out", "shared_out"))
    shared = _mlp(draw, f"{prefix}.shared", hidden, 64)
    return replace(moe, apart=Apart(*norms), shared=shared, shared_gate=None, weigh_input=False)


def _routing(draw: Draw, prefix: str, count: int, quantized: bool) -> dict[str, Any]:
    """How many of ``count`` experts are chosen, and how; ``quantized``: all."""
    kind = draw(("plain", "plain", "correction", "groups", "mixed"))
    if kind == "mixed" and count > 1 and not quantized:
        return {"top_k": 2, "scoring": "sparsemixer", "norm_topk": False, "jitter": draw((0.0, 0.2))}
    found = {"scoring": draw(("softmax", "sigmoid")), "norm_topk": draw(BOTH)}
    if kind == "correction":
        found["correction"] = f"{prefix}.gate.e_score_correction_bias"
    if kind == "groups" and count in (4, 6) and not quantized:
        chosen = {
            "groups": count // 2,
            "top_groups": count // 2 - 1,
            "group_score": draw(("best", "two")),
        }
        return found | chosen | {"top_k": draw(range(1, 3))}
    return found | {"top_k": count if quantized else draw(range(1, count + 1))}


def _layer(draw: Draw, index: int, hidden: int, quantized: bool, ropes: Sequence[RopeSpec], rare: bool) -> LayerSpec:
    """``rare``: with what not every executor has."""
    prefix = f"model.layers.{index}"
    # attention, latent attention, short convolution, Mamba, delta rule, mlp, experts
    kinds = draw(("am", "sm", "nm", "n", "dm", "lm", "le") if rare else ("am", "ae", "ma", "ame", "a"))
    parallel = draw((0, 0, len(kinds), 2))  # how many sublayers read what the first one reads
    shares = draw(BOTH)
    sublayers: list[Sublayer] = []
    for i, kind in enumerate(kinds):
        if kind == "a":
            mixer: Any = _attention(draw, f"{prefix}.self_attn", hidden, ropes, rare)
        elif kind == "l":
            mixer = _latent(draw, f"{prefix}.self_attn", hidden, ropes)
        elif kind == "s":
            mixer = _short_conv(draw, f"{prefix}.conv", hidden)
        elif kind == "n":
            mixer = _mamba(draw, f"{prefix}.mamba", hidden)
        elif kind == "d":
            mixer = _delta(draw, f"{prefix}.linear_attn", hidden)
        elif kind == "m":
            mixer = _mlp(draw, f"{prefix}.mlp", hidden, draw((48, 80)))
            if draw(range(4)) == 0:
                mixer = replace(mixer, inner_norm=_norm(draw, f"{prefix}.inner_norm", mixer.up.out_features))
            if rare:
                mixer = replace(mixer, activation="relu2", gate_scale=1.0 if mixer.gate is None else 0.6)
            elif mixer.gate is None and draw(BOTH):
                mixer = replace(mixer, activation="xielu", curve=f"{prefix}.mlp.act_fn")
        else:
            mixer = _moe(draw, f"{prefix}.moe", hidden, quantized)
            if parallel == 0 and draw(range(3)) == 0:
                mixer = _apart(draw, f"{prefix}.moe", hidden, mixer)
        before = _maybe_norm(draw, f"{prefix}.before_{i}", hidden) if mixer.readers() else None
        if 0 < i < parallel and shares:
            before = sublayers[i - 1].pre_norm
        sublayers.append(
            Sublayer(
                mixer,
                before,
                _norm(draw, f"{prefix}.after_{i}", hidden)
                if before is None
                else _maybe_norm(draw, f"{prefix}.after_{i}", hidden),
                draw((1.0, 0.5)),
                "block" if i < parallel else "stream",
            )
        )
    if draw(range(4)) == 0:
        sublayers[-1] = replace(sublayers[-1], factor=f"{prefix}.factor")
    return LayerSpec(tuple(sublayers))


def _reading_others(draw: Draw, hidden: int, layers: list[LayerSpec], ropes: Sequence[RopeSpec]) -> list[LayerSpec]:
    """With a layer behind them that reads keys and values of the first one with attention, then a plain one."""
    places = [(i, k) for i, layer in enumerate(layers) for k, s in enumerate(layer.sublayers)]
    at = next((at for at in places if layers[at[0]].sublayers[at[1]].mixer.kind == "attention"), None)
    if at is None:
        return layers
    (source, k), prefix = at, f"model.layers.{len(layers)}"
    subs = list(layers[source].sublayers)
    plain: dict[str, Any] = dict.fromkeys(("alibi", "softcap", "sinks", "clip", "q_scale", "gate", "o_norm"))
    mixer: Any = subs[k].mixer
    a = replace(mixer, chunked=False, norm_last=False, **plain)
    subs[k] = replace(subs[k], mixer=a)
    size = a.heads * a.head_dim
    q, o = LinearSpec(f"{prefix}.q", hidden, size, draw(BOTH)), LinearSpec(f"{prefix}.o", size, hidden, draw(BOTH))
    norm = draw((None, NormSpec(f"{prefix}.q_norm", a.head_dim, 1e-6)))
    reads = ReuseSpec(q, o, a.heads, a.kv_heads, a.head_dim, draw((None, *ropes)), source, norm)
    last = Sublayer(reads, _norm(draw, f"{prefix}.before", hidden), _maybe_norm(draw, f"{prefix}.after", hidden))
    return [*layers[:source], LayerSpec(tuple(subs)), *layers[source + 1 :], LayerSpec((last,))]


def _given(draw: Draw, hidden: int, layers: list[LayerSpec]) -> tuple[list[LayerSpec], PerLayerTable]:
    """With embeddings of each layer's own."""
    size, found = draw((16, 32)), []
    for i, layer in enumerate(layers):
        prefix = f"model.layers.{i}.per_layer"
        gate, down = (
            LinearSpec(f"{prefix}.{name}", *shape, draw(BOTH))
            for name, shape in (("gate", (hidden, size)), ("down", (size, hidden)))
        )
        mixer = PerLayerSpec(gate, down, draw(("silu", "gelu_tanh")), i * size)
        norms = _maybe_norm(draw, f"{prefix}.before", hidden), _norm(draw, f"{prefix}.after", hidden)
        last = layer.sublayers[-1]
        plain = (*layer.sublayers[:-1], replace(last, factor=None))
        found.append(LayerSpec((*plain, Sublayer(mixer, *norms, factor=last.factor))))
    projection = LinearSpec("model.projection", hidden, size * len(layers))
    scales = draw(((2.0, 0.5, 0.7), (1.0, 0.3, 1.0)))
    norm = _norm(draw, "model.projection_norm", size)
    return found, PerLayerTable("model.table", VOCAB + draw((0, 3)), scales[0], projection, scales[1], norm, scales[2])


def _in_blocks(layer: LayerSpec, block: int) -> LayerSpec:
    """Its tokens see those of their own block both ways."""
    changes: dict[str, Any] = {"window": None, "chunked": False, "block": block}
    changed = (replace(s.mixer, **changes) if s.mixer.kind == "attention" else s.mixer for s in layer.sublayers)
    return LayerSpec(tuple(replace(s, mixer=m) for s, m in zip(layer.sublayers, changed, strict=True)))


def _beginning(draw: Draw, hidden: int) -> EncoderSpec | None:
    """What is added to embeddings, and the norm behind that; most often nothing."""
    kind = draw(("", "", "", "positions", "norm", "both"))
    norm = _norm(draw, "model.embed_norm", hidden) if kind in ("norm", "both") else None
    offset = draw((0, 2))
    if kind in ("positions", "both"):
        return EncoderSpec("model.positions", 256 + offset, offset, writes=True, norm=norm)
    return EncoderSpec(writes=True, norm=norm) if kind else None


def any_spec(draw: Draw, quantized: bool = False) -> DecoderSpec:
    """A valid spec, every choice in it by ``draw``."""
    hidden = draw((32, 48, 80))
    rare, ropes = draw(BOTH), _ropes(draw((16, 64)))
    layers = [_layer(draw, i, hidden, quantized, ropes, rare) for i in range(draw(range(1, 3)))]
    attention = [s.mixer for layer in layers for s in layer.sublayers if s.mixer.keeps() is not None]
    blocks = all(m.kind == "attention" for m in attention) and draw(range(6)) == 0
    if blocks:
        layers = [_in_blocks(layer, 4) for layer in layers]
    layers = _reading_others(draw, hidden, layers, ropes) if not blocks and draw(range(3)) == 0 else layers
    layers, table = _given(draw, hidden, layers) if draw(range(4)) == 0 else (layers, None)
    dims = Dims(VOCAB, hidden, 0, len(layers), 1, 1, 1, 1e-6, 256, draw(BOTH))
    spec = assemble(
        dims,
        layers,
        _norm(draw, "model.norm", hidden),
        head_bias=draw(BOTH),
        embed_scale=draw((1.0, 2.0)),
        head_scale=draw((1.0, 0.25)),
        logit_softcap=draw((None, 3.0)),
        encoder=_beginning(draw, hidden),
        per_layer=table,
    )
    spec = replace(spec, mask_token=3) if blocks else spec
    check_spec(spec)
    return spec


@st.composite
def specs(draw: Any, quantized: bool = False) -> Any:
    return any_spec(lambda options: draw(st.sampled_from(options)), quantized)


def weights(spec: Any, form: str, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=g)

    centres = {n.name: 1.0 - n.weight_offset for n in spec.norms()}
    found: dict[str, Any] = {
        name: centres.get(name, 0.0) + (0.2 if name in centres else 0.3) * normal(size)
        for name, size in spec.vectors().items()
    }
    found |= {name: torch.tensor([-1e-6]) for name in found if name.endswith("act_fn.eps")}  # of every model there is
    found[spec.embed] = Dense(normal(spec.vocab_size, spec.hidden_size))
    if not spec.tied:
        found[spec.head] = Dense(normal(spec.vocab_size, spec.hidden_size) / spec.hidden_size**0.5)
    found |= {name: Dense(normal(*shape)) for name, shape in spec.tables().items()}
    routers = spec.routers()
    for x in spec.linears():
        w = normal(x.out_features, x.in_features) * 1.2 / x.in_features**0.5
        own = FORMS[int(torch.randint(3, (), generator=g))] if form == "mixed" else form
        found[x.name] = Dense(w)
        if own == "int4" and x.name not in routers:
            found[x.name] = _reordered(to_group_int(w, 4, 16), g) if form == "mixed" else to_group_int(w, 4, 16)
        elif own == "int8" and x.name not in routers:
            found[x.name] = to_channel_int8(w, x.name)
    return found


def _reordered(weight: GroupInt, g: torch.Generator) -> GroupInt:
    """Now and then with columns that belong to the groups in another order."""
    columns = weight.shape[1]
    if torch.rand((), generator=g) < 0.5:
        return weight
    order = torch.randperm(columns, generator=g)
    index = torch.empty(columns, dtype=torch.int32)
    index[order] = torch.arange(columns, dtype=torch.int32) // weight.group_size
    return replace(weight, group_index=index)


def dense(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers of canonical weights."""
    return {k: v if isinstance(v, torch.Tensor) else v.dequantize() for k, v in found.items()}
