"""Gemma 4 (text): Gemma 3 with norms on values, wider heads of other keys in layers that see everything, and a factor
of the residual stream a layer. The small ones have embeddings of each layer's own, and later layers read keys and
values of earlier ones; 26B-A4B has experts beside the MLP. Source: transformers ``Gemma4ForCausalLM``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import Dims, read_dims, read_window
from toolkit.models.config.fields import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, MAX_VOCAB, Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, assemble, attention, experts, gated_mlp, rms_norm
from toolkit.models.families.gemma2 import softcap
from toolkit.models.family import WITHIN, Family, Tiny
from toolkit.models.gguf import BLOCK, EXPERT_BLOCK, QK_NORMS, TOP, Gguf, Metadata
from toolkit.models.gguf import SANDWICH_NORMS as GGUF_NORMS
from toolkit.models.spec import (
    Activation,
    Apart,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LinearSpec,
    MoeSpec,
    NormSpec,
    PerLayerSpec,
    PerLayerTable,
    ReuseSpec,
    Sublayer,
)
from toolkit.models.stored import fused_experts, renamed, stored_tensors

SLIDES, FULL = "sliding_attention", "full_attention"
ROPES = {
    SLIDES: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
TABLE, PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
ENDS = {
    ".mlp.gate": ".router.proj",
    ".per_layer.gate_proj": ".per_layer_input_gate",
    ".per_layer.down_proj": ".per_layer_projection",
}
ROUTER = ".router.scale"  # the weight of a norm, by this name alone


def _types(config: Fields, layers: int) -> list[str]:
    """What each layer sees; the last one sees everything whatever the file says."""
    found = config.choices("layer_types", layers, tuple(ROPES))
    types = found or [SLIDES if (i + 1) % 6 else FULL for i in range(layers)]
    return [*types[:-1], FULL]


def _own_dims(config: Fields, dims: Dims, types: list[str]) -> list[Dims]:
    """Of each layer, with heads of its own size and number."""
    heads = config.integer("global_head_dim", default=512, high=65_536)
    keys = config.integer("num_global_key_value_heads", default=dims.kv_heads, high=dims.heads)
    keys = keys if config.flag("attention_k_eq_v", False) else dims.kv_heads
    stated = config.nested("per_layer_config")
    found = []
    for i, kind in enumerate(types):
        own = replace(dims, head_dim=heads, kv_heads=keys) if kind == FULL else dims
        if stated is not None:  # as transformers writes it since 5.10, in place of the two
            entry = stated.inner(str(i))
            own = replace(
                dims,
                head_dim=entry.integer("head_dim", default=dims.head_dim, high=65_536),
                kv_heads=entry.integer("num_key_value_heads", default=dims.kv_heads, high=dims.heads),
            )
        if own.heads % own.kv_heads:
            config.fail("num_global_key_value_heads", own.kv_heads, f"a divisor of num_attention_heads ({own.heads})")
        found.append(own)
    return found


def _sources(config: Fields, types: list[str]) -> list[int | None]:
    """Of each layer the one whose keys and values it reads, if not its own: the last of its kind that has some."""
    own = len(types) - config.integer("num_kv_shared_layers", default=0, low=0, high=len(types))
    last = {kind: i for i, kind in enumerate(types[:own])}
    if missing := set(types[own:]) - set(last):
        kind = min(missing)
        config.fail("num_kv_shared_layers", len(types) - own, f"one that leaves a layer of {kind} with keys of its own")
    return [None if i < own else last[kind] for i, kind in enumerate(types)]


def _given(config: Fields) -> int:
    """Numbers that a layer is given of each token; an explicit null means none."""
    none = "hidden_size_per_layer_input" in config.values and not config.has("hidden_size_per_layer_input")
    found: int = 0 if none else config.integer("hidden_size_per_layer_input", default=256, low=0)
    return found


def _mixture(config: Fields, dims: Dims, act: Activation) -> Callable[[int], MoeSpec]:
    count = config.integer("num_experts", high=MAX_EXPERTS)
    if count * dims.layers > MAX_EXPERTS_IN_ALL:
        config.fail("num_experts", count, f"at most {MAX_EXPERTS_IN_ALL} experts in all {dims.layers} layers")
    top_k = config.integer("top_k_experts", "num_experts_per_tok", high=count)
    inner = config.integer("moe_intermediate_size", "expert_intermediate_size")

    def make(layer: int) -> MoeSpec:
        made = experts(layer, dims.hidden, inner, act, count=count, top_k=top_k, norm_topk=True)
        prefix = f"model.layers.{layer}"  # of experts as quantized files have them, one by one
        own = tuple(gated_mlp(f"{prefix}.experts.{e}", dims.hidden, inner, act) for e in range(count))
        return replace(made, experts=own, logit_scale=dims.hidden**-0.5, each=f"{prefix}.router.per_expert_scale")

    return make


def build(config: Fields) -> Built:
    dims = read_dims(config, tied=True, head_dim=256, kv_heads=4)
    if (both := config.values.get("use_bidirectional_attention")) not in (None, False, "vision"):
        config.fail("use_bidirectional_attention", both, 'null or "vision": a decoder is causal')
    given = _given(config)
    config = config.filled({"rope_parameters": ROPES})
    types, window = _types(config, dims.layers), read_window(config, default=512)
    owns, sources = _own_dims(config, dims, types), _sources(config, types)
    for i, source in enumerate(sources):
        if source is not None and owns[i] != owns[source]:
            heads = f"{owns[i].kv_heads} heads of {owns[i].head_dim}"
            config.fail(f"per_layer_config.{i}", heads, f"those of layer {source}, whose keys and values it reads")
    bias, same = config.flag("attention_bias", False), config.flag("attention_k_eq_v", False)
    act = config.activation("hidden_activation", default="gelu_pytorch_tanh")
    wide = config.flag("use_double_wide_mlp", False)
    mixture = _mixture(config, dims, act) if config.flag("enable_moe_block", False) else None

    def norm(name: str, size: int, weight: bool = True) -> NormSpec:
        return NormSpec(name, size, dims.eps, weight=weight)

    def attends(i: int) -> AttentionSpec | ReuseSpec:
        kind, own, source = types[i], owns[i], sources[i]
        rope = read_rope(config, head_dim=own.head_dim, max_position=dims.max_position, layer_type=kind)
        seen = window if kind == SLIDES else None
        made = attention(i, own, rope, window=seen, qkv_bias=bias, o_bias=bias, qk_norm=True, scale=1.0)
        if source is not None:
            heads = own.heads, own.kv_heads, own.head_dim
            return ReuseSpec(made.q, made.o, *heads, rope, source, made.q_norm)
        made = replace(made, v_norm=norm(f"model.layers.{i}.self_attn.v_norm", own.head_dim, weight=False))
        return replace(made, v=made.k) if same and kind == FULL else made

    layers = []
    for i in range(dims.layers):
        prefix = f"model.layers.{i}"

        def named(name: str, prefix: str = prefix) -> NormSpec:
            return norm(f"{prefix}.{name}", dims.hidden)

        sublayers = [Sublayer(attends(i), named("input_layernorm"), named("post_attention_layernorm"))]
        inner = dims.intermediate * (2 if wide and sources[i] is not None else 1)
        mlp = gated_mlp(f"{prefix}.mlp", dims.hidden, inner, act)
        before, after = named("pre_feedforward_layernorm"), named("post_feedforward_layernorm")
        if mixture is None:
            sublayers.append(Sublayer(mlp, before, after))
        else:
            ends = named("post_feedforward_layernorm_2"), named("post_feedforward_layernorm_1")
            apart = Apart(named("router.scale"), named("pre_feedforward_layernorm_2"), before, *ends)
            sublayers.append(Sublayer(replace(mixture(i), shared=mlp, apart=apart), None, after))
        if given:
            gate = LinearSpec(f"{prefix}.per_layer.gate_proj", dims.hidden, given, False, "column")
            back = LinearSpec(f"{prefix}.per_layer.down_proj", given, dims.hidden, False, "row")
            own = PerLayerSpec(gate, back, act, at=i * given)
            sublayers.append(Sublayer(own, None, named("post_per_layer_input_norm")))
        sublayers[-1] = replace(sublayers[-1], factor=f"{prefix}.layer_scalar")
        layers.append(LayerSpec(tuple(sublayers)))

    table, pad = None, config.values.get("pad_token_id")
    if given:
        columns = dims.layers * given
        table = PerLayerTable(
            TABLE,
            config.integer("vocab_size_per_layer_input", default=262_144, low=dims.vocab, high=MAX_VOCAB),
            given**0.5,
            LinearSpec(PROJECTION, dims.hidden, columns),
            dims.hidden**-0.5,
            norm("model.per_layer_projection_norm", given),
            2**-0.5,
            pad if isinstance(pad, int) and 0 <= pad < dims.vocab else 0,
        )
    spec = assemble(
        dims,
        layers,
        rms_norm("model.norm", dims.hidden, dims.eps),
        embed_scale=dims.hidden**0.5,
        logit_softcap=softcap(config, "final_logit_softcapping", None),
        per_layer=table,
    )
    first = () if mixture is None else mixture(0).experts
    sizes = (len(first), dims.hidden, first[0].up.out_features) if first else (0, 0, 0)
    stacks = fused_experts(*sizes, ("experts.gate_up_proj", "experts.down_proj"), inside="experts") if first else ()
    stored = stored_tensors(spec, renamed(ENDS), stacks)
    return spec, [replace(item, bare=True) if item.name.endswith(ROUTER) else item for item in stored]


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    slides = file.flags("attention.sliding_window_pattern")
    if slides is None or len(slides) != count or slides[-1]:
        told = f"expected {count} truths, one a layer, of which the last is false"
        raise ToolkitError(f"gguf: gemma4.attention.sliding_window_pattern: {told}")
    keys, inner = file.each("attention.head_count_kv", count), file.each("feed_forward_length", count)
    head, full, local = config["head_dim"], slides.index(False), slides.index(True) if True in slides else 0
    shared = file.stated("attention.shared_kv_layers", 0)
    turning = sum(factor == 1 for factor in file.factors) or head // 2
    cap = file.number("final_logit_softcapping", 30.0)  # what llama.cpp takes where a file is silent
    experts = {"num_experts": "expert_count", "top_k_experts": "expert_used_count"}
    experts |= {"moe_intermediate_size": "expert_feed_forward_length"}
    mixed, given = file.has("expert_count"), file.stated("embedding_length_per_layer_input", 0)
    return {
        "layer_types": [SLIDES if each else FULL for each in slides],
        "sliding_window": file.whole("attention.sliding_window"),
        "head_dim": file.whole("attention.key_length_swa"),
        "num_key_value_heads": keys[local],
        "per_layer_config": {
            str(i): {"head_dim": head, "num_key_value_heads": keys[i]} for i in range(count) if not slides[i]
        },
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": given,
        "vocab_size_per_layer_input": file.rows("per_layer_token_embd.weight") or config["vocab_size"],
        "final_logit_softcapping": cap or None,
        "use_bidirectional_attention": None if given else "vision",  # no key tells; llama.cpp knows them by their width
        "enable_moe_block": mixed,
        **({name: file.whole(key) for name, key in experts.items()} if mixed else {}),
        "rope_parameters": {
            FULL: ROPES[FULL] | {
                "rope_theta": file.number("rope.freq_base", 1e4), "partial_rotary_factor": 2 * turning / head
            },
            SLIDES: ROPES[SLIDES] | {"rope_theta": file.number("rope.freq_base_swa", 1e4)},
        },
    }  # fmt: skip


def _write(spec: DecoderSpec) -> dict[str, Any]:
    layers: list[Any] = [layer.sublayers[0].mixer for layer in spec.layers]
    own = dict(spec.attention_layers())
    seen = [own[m.source if m.kind == "reuse" else i] for i, m in enumerate(layers)]
    full, local = (next((a for a in seen if (a.window is None) == sees), None) for sees in (True, False))
    if full is None or local is None or any(a.head_dim != (local if a.window else full).head_dim for a in seen):
        raise ToolkitError("gguf: llama.cpp's gemma4 has layers that slide and others, alike in the size of heads each")
    local_rope, full_rope = local.rope, full.rope
    assert local_rope is not None and full_rope is not None
    table = spec.per_layer
    if spec.vision is not None and spec.vision.mutual == (table is not None):
        raise ToolkitError(
            "gguf: llama.cpp lets tokens of pictures see each other in models without per-layer embeddings"
        )
    mlps = [mlps[-1] for mlps in (layer.sublayers[1].mixer.mlps() for layer in spec.layers)]
    return {
        "attention.head_count_kv": _each([a.kv_heads for a in seen]),
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": local.head_dim,
        "attention.value_length_swa": local.head_dim,
        "attention.sliding_window_pattern": np.array([a.window is not None for a in seen]),
        "attention.shared_kv_layers": sum(m.kind == "reuse" for m in layers),
        "feed_forward_length": _each([mlp.up.out_features for mlp in mlps]),
        "embedding_length_per_layer_input": 0 if table is None else table.norm.size,
        "final_logit_softcapping": float(spec.logit_softcap or 0.0),
        "rope.freq_base_swa": float(local_rope.theta),
        "rope.dimension_count_swa": local_rope.rotary_dim,
    }


def _each(numbers: list[int]) -> Any:
    """A number a layer, or the one of all."""
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers, np.int32)


NAMES = {
    **BLOCK,
    **QK_NORMS,
    **GGUF_NORMS,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer.gate_proj",
    "proj": "per_layer.down_proj",
    "post_norm": "post_per_layer_input_norm",
}
BESIDE = {
    **{theirs: ours.removeprefix("mlp.") if "{}" in ours else ours for theirs, ours in EXPERT_BLOCK.items()},
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
GGUF = Gguf(
    "gemma4",
    "gemma4_text",
    NAMES,
    biases=False,
    window=True,
    varied=True,
    fields={"hidden_activation": "gelu_pytorch_tanh"},
    read=_read,
    write=_write,
    scale=lambda spec: 1.0,
    local="own",
    bare=("ffn_gate_inp.scale",),
    top={
        **TOP,
        "per_layer_token_embd": TABLE,
        "per_layer_model_proj": PROJECTION,
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    stacks={"ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj")},
    idle=("attn_k", "attn_v", "attn_k_norm"),
    words="gemma4",
)
WITH_EXPERTS = replace(
    GGUF,
    names=NAMES | BESIDE,
    numbers={"top_k_experts": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"},
    fits=lambda spec: bool(spec.mixtures()),
)
SIZES = dict(
    head_dim=16,
    global_head_dim=32,
    sliding_window=16,
    num_hidden_layers=3,
    layer_types=[SLIDES, SLIDES, FULL],
    vocab_size_per_layer_input=320,
)
FAMILY = Family(
    "gemma4_text",
    "Gemma 4 E2B, E4B, 26B-A4B, 31B (text)",
    ("Gemma4ForCausalLM",),
    build,
    (
        Tiny(SIZES | dict(num_hidden_layers=6, layer_types=[SLIDES, FULL] * 3, num_kv_shared_layers=3,
                          use_double_wide_mlp=True, hidden_size_per_layer_input=32, attention_k_eq_v=True,
                          num_global_key_value_heads=1)),
        Tiny(SIZES | dict(hidden_size_per_layer_input=0, final_logit_softcapping=10.0, enable_moe_block=True,
                          num_experts=4, top_k_experts=2, moe_intermediate_size=32)),
    ),
    replace(GGUF, others=(WITH_EXPERTS,)),
    spellings=WITHIN,
)  # fmt: skip
