"""Pieces that the family files are put together from.

Most families are Llama with differences: ``llama_like`` takes the differences. One that is not reads its dimensions,
builds one ``LayerSpec`` a layer from ``attention``, ``gated_mlp`` and ``experts``, joins them with ``assemble`` and
lists the checkpoint's tensors with ``stored_tensors``. Nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LinearSpec,
    Mixer,
    MlpSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    StoredTensor,
    Sublayer,
)
from toolkit.models.spec.decoder import grouped
from toolkit.models.stored import Fused, stored_tensors

Built = tuple[DecoderSpec, list[StoredTensor]]
LayerNorms = tuple[tuple[str | None, str | None], tuple[str | None, str | None]]
"""Names of the norms before and after attention, and before and after the feed-forward."""
PRE_NORMS: LayerNorms = (("input_layernorm", None), ("post_attention_layernorm", None))
POST_NORMS: LayerNorms = ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm"))
PARALLEL_NORM: LayerNorms = (("input_layernorm", None), ("input_layernorm", None))
SANDWICH_NORMS: LayerNorms = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
NormMaker = Callable[[str, int], NormSpec]
"""Called with a norm's name and how many numbers it norms at once."""
QkNorm = bool | Literal["own", "all"]
"""Whether q and k are normed, head by head; "own": each head with weights of its own; "all": all heads at once."""


def llama_like(
    config: Fields,
    dims: Dims | None = None,
    *,
    rope: RopeSpec | Sequence[RopeSpec | None] | None = None,
    theta: float = 10_000.0,
    partial_rotary: float = 1.0,
    turned: Sequence[bool] | None = None,
    windows: int | Sequence[int | None] | None = None,
    attention_bias: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QkNorm = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    activation: Activation | None = None,
    change: Callable[[int, AttentionSpec], Mixer] | None = None,
    feed_forward: Callable[[int], MlpSpec | MoeSpec | None] | None = None,
    norms: LayerNorms = PRE_NORMS,
    norm: NormMaker | None = None,
    norm_offset: float = 0.0,
    parallel: bool = False,
    residual_scale: float = 1.0,
    rename: Callable[[str], str] = str,
    fused: Sequence[Fused] = (),
    pairs: bool = False,
    unit_head: bool = False,
    **model: Any,
) -> Built:
    """Llama with the differences given.

    What is absent is read as Llama's config has it: ``dims``, ``rope``, ``activation`` (``hidden_act``). ``rope`` and
    ``windows``: of all layers, or a list with those of each, None for a layer without. ``theta``, ``partial_rotary``:
    what the rope's absent base, and share of a head that turns, mean; ``turned``: the layers with rope.
    ``attention_bias``: both ``qkv_bias`` and ``o_bias``. ``change``: what stands in the place of a layer's attention,
    by its number and what that would be. ``feed_forward``: that of a layer by its number, None for the dense gated one.
    ``norms``: their names; ``norm``: what makes each, if not an RMS norm with ``norm_offset``. ``parallel``: attention
    and feed-forward both read what the layer begins with. ``rename``, ``fused``, ``pairs``, ``unit_head``: as of
    ``stored_tensors``; ``model``: fields of ``DecoderSpec``.
    """
    dims = dims or read_dims(config)
    norm = norm or partial(rms_norm, eps=dims.eps, offset=norm_offset)
    ropes = _ropes(config, dims, rope, theta, partial_rotary)
    act = activation or config.activation("hidden_act")
    ropes = [own if turns else None for own, turns in zip(ropes, turned or [True] * dims.layers, strict=True)]
    seen = windows if isinstance(windows, Sequence) else [windows] * dims.layers
    layers = []
    for i in range(dims.layers):
        own = attention(
            i,
            dims,
            ropes[i],
            window=seen[i],
            qkv_bias=qkv_bias or attention_bias,
            o_bias=o_bias or attention_bias,
            qk_norm=qk_norm,
            norm=norm,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        mixer = own if change is None else change(i, own)
        mlp = None if feed_forward is None else feed_forward(i)
        if mlp is None:
            mlp = gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act, mlp_bias)
        layers.append(_layer(i, (mixer, mlp), dims.hidden, norms, norm, residual_scale, parallel))
    spec = assemble(dims, layers, norm("model.norm", dims.hidden), **model)
    return spec, stored_tensors(spec, rename, fused, pairs=pairs, unit_head=unit_head)


def _ropes(
    config: Fields,
    dims: Dims,
    rope: RopeSpec | Sequence[RopeSpec | None] | None,
    theta: float,
    partial_rotary: float,
) -> Sequence[RopeSpec | None]:
    found = rope or read_rope(
        config,
        head_dim=dims.head_dim,
        max_position=dims.max_position,
        default_theta=theta,
        default_partial=partial_rotary,
    )
    return [found] * dims.layers if isinstance(found, RopeSpec) else found


def _layer(
    number: int,
    parts: tuple[Mixer, Mixer],
    size: int,
    norms: LayerNorms,
    norm: NormMaker,
    residual_scale: float,
    parallel: bool,
) -> LayerSpec:
    sublayers = []
    for part, (before, after) in zip(parts, norms, strict=True):
        pre, post = (None if name is None else norm(f"model.layers.{number}.{name}", size) for name in (before, after))
        sublayers.append(Sublayer(part, pre, post, residual_scale, "block" if parallel else "stream"))
    return LayerSpec(tuple(sublayers))


def rms_norm(name: str, size: int, eps: float, offset: float = 0.0) -> NormSpec:
    return NormSpec(name, size, eps, offset)


def layer_norm(
    name: str, size: int, eps: float, bias: bool = False, offset: float = 0.0, weight: bool = True
) -> NormSpec:
    return NormSpec(name, size, eps, offset, kind="layer", bias=bias, weight=weight)


def attention(
    layer: int,
    dims: Dims,
    rope: RopeSpec | None,
    *,
    window: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: QkNorm = False,
    norm: NormMaker | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> AttentionSpec:
    """Attention of one layer; ``scale`` defaults to 1/sqrt(head_dim). The cache group is set by ``assemble``."""
    norm = norm or partial(rms_norm, eps=dims.eps)
    prefix = f"model.layers.{layer}.self_attn"
    q_size, kv_size = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return AttentionSpec(
        q=LinearSpec(f"{prefix}.q_proj", dims.hidden, q_size, qkv_bias, "column"),
        k=LinearSpec(f"{prefix}.k_proj", dims.hidden, kv_size, qkv_bias, "column"),
        v=LinearSpec(f"{prefix}.v_proj", dims.hidden, kv_size, qkv_bias, "column"),
        o=LinearSpec(f"{prefix}.o_proj", q_size, dims.hidden, o_bias, "row"),
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        scale=dims.head_dim**-0.5 if scale is None else scale,
        rope=rope,
        q_norm=_head_norm(f"{prefix}.q_norm", qk_norm, norm, dims.heads, dims.head_dim),
        k_norm=_head_norm(f"{prefix}.k_norm", qk_norm, norm, dims.kv_heads, dims.head_dim),
        window=window,
        softcap=softcap,
        sinks=f"{prefix}.sinks" if sinks else None,
    )


def _head_norm(name: str, kind: QkNorm, norm: NormMaker, heads: int, head_dim: int) -> NormSpec | None:
    if not kind:
        return None
    made = norm(name, heads * head_dim if kind == "all" else head_dim)
    return replace(made, heads=heads) if kind == "own" else made


def gated_mlp(prefix: str, hidden: int, inner: int, activation: Activation, bias: bool = False) -> MlpSpec:
    return MlpSpec(
        gate=LinearSpec(f"{prefix}.gate_proj", hidden, inner, bias, "column"),
        up=LinearSpec(f"{prefix}.up_proj", hidden, inner, bias, "column"),
        down=LinearSpec(f"{prefix}.down_proj", inner, hidden, bias, "row"),
        activation=activation,
    )


def plain_mlp(layer: int, dims: Dims, activation: Activation, bias: bool) -> MlpSpec:
    prefix = f"model.layers.{layer}.mlp"
    return MlpSpec(
        gate=None,
        up=LinearSpec(f"{prefix}.up_proj", dims.hidden, dims.intermediate, bias, "column"),
        down=LinearSpec(f"{prefix}.down_proj", dims.intermediate, dims.hidden, bias, "row"),
        activation=activation,
    )


def experts(
    layer: int,
    hidden: int,
    inner: int,
    activation: Activation,
    *,
    count: int,
    top_k: int,
    norm_topk: bool,
    shared: int = 0,
    shared_gate: bool = False,
    bias: bool = False,
    correction: bool = False,
    **routing: Any,
) -> MoeSpec:
    """``inner``: width of an expert; ``shared``: of the one that every token goes through, 0 for none. ``bias``: of
    router and experts. ``correction``: whether there is one; ``routing``: further fields of ``MoeSpec``.
    """
    prefix = f"model.layers.{layer}.mlp"
    return MoeSpec(
        router=LinearSpec(f"{prefix}.gate", hidden, count, bias),
        experts=tuple(gated_mlp(f"{prefix}.experts.{e}", hidden, inner, activation, bias) for e in range(count)),
        top_k=top_k,
        norm_topk=norm_topk,
        shared=gated_mlp(f"{prefix}.shared_expert", hidden, shared, activation) if shared else None,
        shared_gate=LinearSpec(f"{prefix}.shared_expert_gate", hidden, 1) if shared_gate else None,
        correction=f"{prefix}.gate.e_score_correction_bias" if correction else None,
        **routing,
    )


def assemble(dims: Dims, layers: Sequence[LayerSpec], final_norm: NormSpec, **extra: Any) -> DecoderSpec:
    """Join the layers: cache groups, context length.

    The family's name is filled in by the registry.
    """
    placed, groups = grouped(layers)
    ropes = (rope for layer in layers for s in layer.sublayers for rope in s.mixer.ropes())
    return DecoderSpec(
        family="",
        vocab_size=dims.vocab,
        hidden_size=dims.hidden,
        layers=placed,
        final_norm=final_norm,
        cache_groups=groups,
        max_position=max([dims.max_position, *(rope.max_position for rope in ropes)]),
        tied=dims.tied,
        **extra,
    )
