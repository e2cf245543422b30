"""Pieces that the family files are put together from.

Most families are Llama with differences: ``llama_like`` takes the differences. One that is not reads its dimensions,
builds one ``LayerSpec`` a layer from ``attention``, ``gated_mlp`` and ``experts``, joins them with ``assemble`` and
lists the checkpoint's tensors with ``stored_tensors``. Nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.models.config_fields import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, MAX_LAYERS, MAX_POSITION, MAX_VOCAB, Fields
from toolkit.models.rope_config import LAYER_TYPES, read_rope
from toolkit.models.spec import (
    Activation,
    AttentionSpec,
    CacheGroup,
    DecoderSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Part,
    RopeSpec,
    StoredTensor,
    Sublayer,
)

Built = tuple[DecoderSpec, list[StoredTensor]]
LayerNorms = tuple[tuple[str | None, str | None], tuple[str | None, str | None]]
"""Names of the norms before and after attention, and before and after the feed-forward."""
PRE_NORMS: LayerNorms = (("input_layernorm", None), ("post_attention_layernorm", None))
POST_NORMS: LayerNorms = ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm"))
SANDWICH_NORMS: LayerNorms = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


@dataclass(frozen=True)
class Dims:
    """The numbers that every family states. ``max_position``: ``max_position_embeddings``."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_position: int
    tied: bool


def read_dims(config: Fields, *, eps: float = 1e-6, tied: bool = False, head_dim: int | None = None) -> Dims:
    """Read and check the dimensions; the arguments are the family's defaults (``head_dim`` None: hidden / heads)."""
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=100_000)
    kv = config.integer("num_key_value_heads", default=heads, high=100_000)
    if heads % kv:
        config.fail("num_key_value_heads", kv, f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", default=head_dim, high=65_536)
    if head_dim is None:
        if hidden % heads:
            config.fail("num_attention_heads", heads, f"a divisor of hidden_size ({hidden}), or head_dim to be given")
        head_dim = hidden // heads
    return Dims(
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        layers=config.integer("num_hidden_layers", "num_layers", high=MAX_LAYERS),
        heads=heads,
        kv_heads=kv,
        head_dim=head_dim,
        eps=config.number("rms_norm_eps", "layer_norm_epsilon", default=eps, high=0.5),
        max_position=config.integer("max_position_embeddings", "max_sequence_length", high=MAX_POSITION),
        tied=config.flag("tie_word_embeddings", tied),
    )


def read_window(config: Fields, default: int | None = None) -> int | None:
    """``sliding_window``; an explicit null turns it off, absence means the family's ``default``."""
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return None
    return config.integer("sliding_window", default=default, high=MAX_POSITION)


def read_windows(config: Fields, layers: int, window: int | None, fallback: Sequence[bool]) -> list[int | None]:
    """The window of each layer from ``layer_types``, or where absent from ``fallback`` (True: the layer slides)."""
    types = config.choices("layer_types", layers, LAYER_TYPES)
    slides = fallback if types is None else [t == "sliding_attention" for t in types]
    return [window if s else None for s in slides]


def llama_like(
    config: Fields,
    dims: Dims | None = None,
    *,
    rope: RopeSpec | Sequence[RopeSpec | None] | None = None,
    windows: int | Sequence[int | None] | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    activation: Activation | None = None,
    feed_forward: Callable[[int], MlpSpec | MoeSpec | None] | None = None,
    norms: LayerNorms = PRE_NORMS,
    norm_offset: float = 0.0,
    residual_scale: float = 1.0,
    rename: Callable[[str], str] = str,
    fused: Sequence[Fused] = (),
    **model: Any,
) -> Built:
    """Llama with the differences given.

    What is absent is read as Llama's config has it: ``dims``, ``rope``, ``activation`` (``hidden_act``). ``rope`` and
    ``windows``: of all layers, or a list with those of each, None for a layer without. ``feed_forward``: that of a
    layer by its number, None for the dense gated one. ``norms``: their names; ``rename``, ``fused``: as of
    ``stored_tensors``; ``model``: fields of ``DecoderSpec``.
    """
    dims = dims or read_dims(config)
    rope = rope or read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    act = activation or config.activation("hidden_act")
    ropes = [rope] * dims.layers if isinstance(rope, RopeSpec) else rope
    seen = windows if isinstance(windows, Sequence) else [windows] * dims.layers
    layers = []
    for i in range(dims.layers):
        mixer = attention(
            i,
            dims,
            ropes[i],
            window=seen[i],
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            norm_offset=norm_offset,
            scale=scale,
            softcap=softcap,
        )
        mlp = None if feed_forward is None else feed_forward(i)
        if mlp is None:
            mlp = gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act, mlp_bias)
        sublayers = []
        for part, (before, after) in zip((mixer, mlp), norms, strict=True):
            pre, post = (
                None if name is None else norm(f"model.layers.{i}.{name}", dims.hidden, dims.eps, norm_offset)
                for name in (before, after)
            )
            sublayers.append(Sublayer(part, pre, post, residual_scale))
        layers.append(LayerSpec(tuple(sublayers)))
    spec = assemble(dims, layers, norm_offset=norm_offset, **model)
    return spec, stored_tensors(spec, rename, fused)


def norm(name: str, size: int, eps: float, offset: float = 0.0) -> NormSpec:
    return NormSpec(name, size, eps, offset)


def attention(
    layer: int,
    dims: Dims,
    rope: RopeSpec | None,
    *,
    window: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    norm_offset: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    """Attention of one layer; ``scale`` defaults to 1/sqrt(head_dim). The cache group is set by ``assemble``."""
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
        q_norm=norm(f"{prefix}.q_norm", dims.head_dim, dims.eps, norm_offset) if qk_norm else None,
        k_norm=norm(f"{prefix}.k_norm", dims.head_dim, dims.eps, norm_offset) if qk_norm else None,
        window=window,
        softcap=softcap,
    )


def gated_mlp(prefix: str, hidden: int, inner: int, activation: Activation, bias: bool = False) -> MlpSpec:
    return MlpSpec(
        gate=LinearSpec(f"{prefix}.gate_proj", hidden, inner, bias, "column"),
        up=LinearSpec(f"{prefix}.up_proj", hidden, inner, bias, "column"),
        down=LinearSpec(f"{prefix}.down_proj", inner, hidden, bias, "row"),
        activation=activation,
    )


def read_experts(config: Fields, layers: int, *names: str) -> tuple[int, int]:
    """(experts a layer, experts a token); ``names``: the field's spellings."""
    count = config.integer(*names, high=MAX_EXPERTS)
    if count * layers > MAX_EXPERTS_IN_ALL:
        config.fail(names[0], count, f"at most {MAX_EXPERTS_IN_ALL} experts in all {layers} layers")
    return count, config.integer("num_experts_per_tok", high=count)


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
) -> MoeSpec:
    """``inner``: width of an expert; ``shared``: of the one that every token goes through, 0 for none."""
    prefix = f"model.layers.{layer}.mlp"
    return MoeSpec(
        router=LinearSpec(f"{prefix}.gate", hidden, count),
        experts=tuple(gated_mlp(f"{prefix}.experts.{e}", hidden, inner, activation) for e in range(count)),
        top_k=top_k,
        norm_topk=norm_topk,
        shared=gated_mlp(f"{prefix}.shared_expert", hidden, shared, activation) if shared else None,
        shared_gate=LinearSpec(f"{prefix}.shared_expert_gate", hidden, 1) if shared_gate else None,
    )


def assemble(dims: Dims, layers: Sequence[LayerSpec], *, norm_offset: float = 0.0, **extra: Any) -> DecoderSpec:
    """Join the layers: cache groups (one for each window size, in order of appearance), final norm, context length.

    The family's name is filled in by the registry.
    """
    groups: dict[int | None, list[int]] = {}
    placed: list[LayerSpec] = []
    max_position = dims.max_position
    for i, layer in enumerate(layers):
        sublayers = []
        for s in layer.sublayers:
            if isinstance(s.mixer, AttentionSpec):
                groups.setdefault(s.mixer.window, []).append(i)
                group = list(groups).index(s.mixer.window)
                if s.mixer.rope is not None:
                    max_position = max(max_position, s.mixer.rope.max_position)
                s = replace(s, mixer=replace(s.mixer, group=group))
            sublayers.append(s)
        placed.append(LayerSpec(tuple(sublayers)))
    return DecoderSpec(
        family="",
        vocab_size=dims.vocab,
        hidden_size=dims.hidden,
        layers=tuple(placed),
        final_norm=norm("model.norm", dims.hidden, dims.eps, norm_offset),
        cache_groups=tuple(
            CacheGroup("full" if w is None else "window", w, tuple(members)) for w, members in groups.items()
        ),
        max_position=max_position,
        tied=dims.tied,
        **extra,
    )


@dataclass(frozen=True)
class Fused:
    """Linears that the checkpoint stores as one matrix: the module's name inside the layer, and the rows of each."""

    name: str
    rows: dict[str, tuple[tuple[int, int], ...]]  # canonical name inside the layer → rows


def fused_qkv(dims: Dims, name: str) -> Fused:
    """The rows of q, then k, then v in the module ``name``."""
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return Fused(
        name,
        {
            "self_attn.q_proj": ((0, q),),
            "self_attn.k_proj": ((q, q + kv),),
            "self_attn.v_proj": ((q + kv, q + 2 * kv),),
        },
    )


def fused_gate_up(dims: Dims, name: str) -> Fused:
    """The rows of the gate, then of the up projection in the module ``name``."""
    n = dims.intermediate
    return Fused(name, {"mlp.gate_proj": ((0, n),), "mlp.up_proj": ((n, 2 * n),)})


def renamed(endings: Mapping[str, str]) -> Callable[[str], str]:
    """A ``rename`` that replaces how a canonical name ends, by the first of ``endings`` that fits."""

    def rename(name: str) -> str:
        ours = next((ours for ours in endings if name.endswith(ours)), None)
        return name if ours is None else name.removesuffix(ours) + endings[ours]

    return rename


def stored_tensors(
    spec: DecoderSpec, rename: Callable[[str], str] = str, fused: Sequence[Fused] = ()
) -> list[StoredTensor]:
    """Every tensor of the checkpoint: embedding, layer after layer (norms, then linears), final norm, head.

    ``rename`` turns a canonical name into the checkpoint's (of a fused module: with ``Fused.name`` in place).
    """
    member = {part: f for f in fused for part in f.rows}
    routers = spec.routers()
    found = [_whole(spec.embed, rename, "embed", (spec.vocab_size, spec.hidden_size))]
    for i, modules in enumerate(_norms_and_linears(spec)):
        prefix = f"model.layers.{i}."
        for m in modules:
            group = member.get(m.name.removeprefix(prefix))
            if isinstance(m, NormSpec):
                found.append(_whole(m.name, rename, "norm", (m.size,)))
            elif group is None:
                kind = "router" if m.name in routers else "linear"
                found.append(_whole(m.name, rename, kind, (m.out_features, m.in_features), m.bias))
            elif m.name == prefix + next(iter(group.rows)):
                total = max(stop for rows in group.rows.values() for _, stop in rows)
                parts = tuple(Part(prefix + name, rows) for name, rows in group.rows.items())
                name = rename(prefix + group.name)
                found.append(StoredTensor(name, "linear", (total, m.in_features), parts, m.bias))
    found.append(_whole(spec.final_norm.name, rename, "norm", (spec.hidden_size,)))
    if not spec.tied:
        found.append(_whole(spec.head, rename, "head", (spec.vocab_size, spec.hidden_size), spec.head_bias))
    return found


def _whole(
    name: str, rename: Callable[[str], str], kind: Any, shape: tuple[int, ...], bias: bool = False
) -> StoredTensor:
    return StoredTensor(rename(name), kind, shape, (Part(name),), bias)


def _norms_and_linears(spec: DecoderSpec) -> list[list[LinearSpec | NormSpec]]:
    """The modules of each layer."""
    found: list[list[LinearSpec | NormSpec]] = []
    for layer in spec.layers:
        alone = replace(spec, layers=(layer,))
        modules: list[LinearSpec | NormSpec] = list(alone.norms()[:-1])
        modules.extend(alone.linears())
        found.append(modules)
    return found
