"""Pieces that the family files are put together from.

Most families are Llama with differences: ``llama_like`` takes the differences. One that is not reads its dimensions,
builds one ``LayerSpec`` a layer from ``attention``, ``gated_mlp`` and ``experts``, joins them with ``assemble`` and
lists the checkpoint's tensors with ``stored_tensors``. Nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from toolkit.models.config.fields import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, MAX_LAYERS, MAX_POSITION, MAX_VOCAB, Fields
from toolkit.models.config.rope import LAYER_TYPES, read_rope
from toolkit.models.spec import (
    Activation,
    AttentionSpec,
    CacheGroup,
    DecoderSpec,
    LayerSpec,
    LinearSpec,
    Mixer,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Part,
    RopeSpec,
    Rows,
    StoredTensor,
    Sublayer,
)
from toolkit.models.spec.keeps import Rule

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
EPS_NAMES = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
NormMaker = Callable[[str, int], NormSpec]
"""Called with a norm's name and how many numbers it norms at once."""
QkNorm = bool | Literal["own", "all"]
"""Whether q and k are normed, head by head; "own": each head with weights of its own; "all": all heads at once."""


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


def read_dims(
    config: Fields,
    *,
    eps: float = 1e-6,
    tied: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
) -> Dims:
    """Read and check the dimensions; the arguments are the family's defaults: what an absent field means. ``head_dim``
    None: hidden / heads, ``kv_heads`` None: as many as heads; an explicit null means so in every family."""
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=100_000)
    stated = config.values
    kv = config.integer(
        "num_key_value_heads",
        default=heads if kv_heads is None or "num_key_value_heads" in stated else kv_heads,
        high=100_000,
    )
    if heads % kv:
        config.fail("num_key_value_heads", kv, f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", default=None if "head_dim" in stated else head_dim, high=65_536)
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
        eps=config.number(*EPS_NAMES, default=eps, high=0.5),
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


def layer_ropes(
    config: Fields, dims: Dims, windows: Sequence[int | None], *, theta: float, local_theta: float
) -> list[RopeSpec]:
    """The rope of each layer where those that slide have their own; files of before transformers 5 scale the others'
    alone. ``theta``, ``local_theta``: of both where the file does not say."""
    read = partial(read_rope, config, head_dim=dims.head_dim, max_position=dims.max_position)
    everywhere = read(default_theta=theta)
    if config.has("rope_parameters") and not config.has("rope_scaling"):
        local = read(default_theta=local_theta, layer_type="sliding_attention")
    else:
        local = RopeSpec(dims.head_dim, local_theta, max_position=dims.max_position)
    return [everywhere if window is None else local for window in windows]


def llama_like(
    config: Fields,
    dims: Dims | None = None,
    *,
    rope: RopeSpec | Sequence[RopeSpec | None] | None = None,
    windows: int | Sequence[int | None] | None = None,
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
    ``windows``: of all layers, or a list with those of each, None for a layer without. ``change``: what stands
    in the place of a layer's attention, by its number and what that would be. ``feed_forward``: that of a layer by its
    number, None for the dense gated one. ``norms``: their names; ``norm``: what makes each, if not an RMS norm with
    ``norm_offset``. ``parallel``: attention and feed-forward both read what the layer begins with. ``rename``,
    ``fused``, ``pairs``, ``unit_head``: as of ``stored_tensors``; ``model``: fields of ``DecoderSpec``.
    """
    dims = dims or read_dims(config)
    norm = norm or partial(rms_norm, eps=dims.eps, offset=norm_offset)
    rope = rope or read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    act = activation or config.activation("hidden_act")
    ropes = [rope] * dims.layers if isinstance(rope, RopeSpec) else rope
    seen = windows if isinstance(windows, Sequence) else [windows] * dims.layers
    layers = []
    for i in range(dims.layers):
        own = attention(
            i,
            dims,
            ropes[i],
            window=seen[i],
            qkv_bias=qkv_bias,
            o_bias=o_bias,
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
        sublayers = []
        for part, (before, after) in zip((mixer, mlp), norms, strict=True):
            pre, post = (
                None if name is None else norm(f"model.layers.{i}.{name}", dims.hidden) for name in (before, after)
            )
            sublayers.append(Sublayer(part, pre, post, residual_scale, "block" if parallel else "stream"))
        layers.append(LayerSpec(tuple(sublayers)))
    spec = assemble(dims, layers, norm("model.norm", dims.hidden), **model)
    return spec, stored_tensors(spec, rename, fused, pairs=pairs, unit_head=unit_head)


def rms_norm(name: str, size: int, eps: float, offset: float = 0.0) -> NormSpec:
    return NormSpec(name, size, eps, offset)


def layer_norm(name: str, size: int, eps: float, bias: bool = False) -> NormSpec:
    return NormSpec(name, size, eps, kind="layer", bias=bias)


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
    """Join the layers: cache groups (one for each rule, in order of appearance), context length.

    The family's name is filled in by the registry.
    """
    groups: dict[Rule, list[int]] = {}
    placed: list[LayerSpec] = []
    max_position = dims.max_position
    for i, layer in enumerate(layers):
        sublayers = []
        for s in layer.sublayers:
            max_position = max([max_position, *(rope.max_position for rope in s.mixer.ropes())])
            if (kept := s.mixer.keeps()) is not None:
                groups.setdefault(kept.rule, []).append(i)
                mixer: Any = s.mixer
                s = replace(s, mixer=replace(mixer, group=list(groups).index(kept.rule)))
            sublayers.append(s)
        placed.append(LayerSpec(tuple(sublayers)))
    return DecoderSpec(
        family="",
        vocab_size=dims.vocab,
        hidden_size=dims.hidden,
        layers=tuple(placed),
        final_norm=final_norm,
        cache_groups=tuple(CacheGroup(*rule, tuple(members)) for rule, members in groups.items()),
        max_position=max_position,
        tied=dims.tied,
        **extra,
    )


@dataclass(frozen=True)
class Fused:
    """Linears that the checkpoint stores as one: the module's name inside the layer, and the rows of each.

    ``shape``: where it is no matrix of all rows; it, ``transposed``, ``bare`` and ``flat`` as in ``StoredTensor``.
    """

    name: str
    rows: dict[str, Rows]  # canonical name inside the layer → rows
    shape: tuple[int, ...] = ()
    transposed: bool = False
    bare: bool = False
    flat: bool = False


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


def fused_by_kv_head(dims: Dims, name: str) -> Fused:
    """For each kv head the rows of its query heads, then of the key head, then of the value head, in ``name``."""
    d, q_per_kv = dims.head_dim, dims.heads // dims.kv_heads
    block = (q_per_kv + 2) * d
    starts = [h * block for h in range(dims.kv_heads)]
    return Fused(
        name,
        {
            "self_attn.q_proj": tuple((s, s + q_per_kv * d) for s in starts),
            "self_attn.k_proj": tuple((s + q_per_kv * d, s + (q_per_kv + 1) * d) for s in starts),
            "self_attn.v_proj": tuple((s + (q_per_kv + 1) * d, s + block) for s in starts),
        },
    )


def fused_gate_up(dims: Dims, name: str) -> Fused:
    """The rows of the gate, then of the up projection in the module ``name``."""
    n = dims.intermediate
    return Fused(name, {"mlp.gate_proj": ((0, n),), "mlp.up_proj": ((n, 2 * n),)})


def fused_experts(
    count: int,
    hidden: int,
    inner: int,
    names: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    *,
    woven: bool = False,
    transposed: bool = False,
    bare: bool = True,
) -> list[Fused]:
    """Experts that stand in two tensors, ``names``: [experts, 2 · inner, hidden], of each expert the gate before up, or
    where they are ``woven`` row by row in turn, and [experts, hidden, inner], down. ``transposed``: with the two last
    axes the other way round."""
    both: dict[str, Rows] = {}
    for e in range(count):
        start, stop = 2 * inner * e, 2 * inner * (e + 1)
        gate, up = (
            ((start, stop, 2), (start + 1, stop, 2)) if woven else ((start, start + inner), (start + inner, stop))
        )
        both |= {f"mlp.experts.{e}.gate_proj": (gate,), f"mlp.experts.{e}.up_proj": (up,)}
    down: dict[str, Rows] = {f"mlp.experts.{e}.down_proj": ((hidden * e, hidden * (e + 1)),) for e in range(count)}
    found = []
    for name, rows, shape in ((names[0], both, (2 * inner, hidden)), (names[1], down, (hidden, inner))):
        stored = (count, *(shape[::-1] if transposed else shape))
        found.append(Fused(name, rows, stored, transposed=transposed, bare=bare))
    return found


def renamed(endings: Mapping[str, str]) -> Callable[[str], str]:
    """A ``rename`` that replaces how a canonical name ends, by the first of ``endings`` that fits."""

    def rename(name: str) -> str:
        ours = next((ours for ours in endings if name.endswith(ours)), None)
        return name if ours is None else name.removesuffix(ours) + endings[ours]

    return rename


def stored_tensors(
    spec: DecoderSpec,
    rename: Callable[[str], str] = str,
    fused: Sequence[Fused] = (),
    *,
    pairs: bool = False,
    unit_head: bool = False,
) -> list[StoredTensor]:
    """Every tensor of the checkpoint: embedding, layer after layer (norms, vectors, linears), final norm, head.

    ``rename`` turns a canonical name into the checkpoint's (of a fused module: with ``Fused.name`` in place).
    ``pairs``: the rotary embedding turns neighbouring elements of a head, so that rows of q and k change places.
    ``unit_head``: rows of the head are divided by their length.
    """
    member = {part: f for f in fused for part in f.rows}
    routers = spec.routers()
    found = [_whole(spec.embed, rename, "embed", (spec.vocab_size, spec.hidden_size))]
    for i, layer in enumerate(spec.layers):
        prefix = f"model.layers.{i}."
        modules = [_norm(n, rename) for n in layer.norms() if n.weight]
        for mixer in (s.mixer for s in layer.sublayers):
            shapes = {name: (size,) for name, size in mixer.vectors().items()} | mixer.shapes()
            modules += [_whole(name, rename, "vector", shape) for name, shape in shapes.items()]
        for m in layer.linears():
            kind: Literal["router", "linear"] = "router" if m.name in routers else "linear"
            group = member.get(m.name.removeprefix(prefix))
            if group is None:
                modules.append(_whole(m.name, rename, kind, (m.out_features, m.in_features), m.bias))
            elif m.name == prefix + next(iter(group.rows)):
                shape = group.shape or (max(r[1] for rows in group.rows.values() for r in rows), m.in_features)
                parts = tuple(Part(prefix + name, rows) for name, rows in group.rows.items())
                forms = {"transposed": group.transposed, "bare": group.bare, "flat": group.flat}
                modules.append(StoredTensor(rename(prefix + group.name), kind, shape, parts, m.bias, **forms))
        found += [_half_split(layer, m) for m in modules] if pairs else modules
    found.append(_norm(spec.final_norm, rename))
    if not spec.tied:
        head = _whole(spec.head, rename, "head", (spec.vocab_size, spec.hidden_size), spec.head_bias)
        found.append(replace(head, unit_rows=unit_head))
    return found


def _whole(
    name: str, rename: Callable[[str], str], kind: Any, shape: tuple[int, ...], bias: bool = False
) -> StoredTensor:
    return StoredTensor(rename(name), kind, shape, (Part(name),), bias)


def _norm(n: NormSpec, rename: Callable[[str], str]) -> StoredTensor:
    return _whole(n.name, rename, "norm", (n.heads, n.size) if n.heads > 1 else (n.size,), n.bias)


def _half_split(layer: LayerSpec, module: StoredTensor) -> StoredTensor:
    """``module`` whose parts for what turns with the position, its norms included, take the even elements of every head
    first, then the odd ones: what turned in neighbouring pairs then turns as ``RopeSpec`` has it."""
    turned = {name: rows for s in layer.sublayers for name, rows in s.mixer.rotary().items()}
    parts = []
    for part in module.parts:
        if (rotary := turned.get(part.name)) is not None:
            rows: list[tuple[int, int] | tuple[int, int, int]] = []
            for r in part.rows or ((0, module.matrix[0]),):
                for head in range(r[0], r[1], rotary.period):
                    start, end = head + rotary.start, head + rotary.start + rotary.count
                    rows += [(head, start), (start, end, 2), (start + 1, end, 2), (end, head + rotary.period)]
            part = replace(part, rows=tuple(r for r in rows if range(*r)))
        parts.append(part)
    return replace(module, parts=tuple(parts))
