"""Nemotron-H, Nemotron Nano 2 and 3: layers of one part each, Mamba-2, attention without rope, a plain MLP or experts.
Source: transformers ``NemotronHForCausalLM``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import Dims, check_convolved, read_dims, read_experts
from toolkit.models.config.fields import Fields
from toolkit.models.config.mamba import MambaDims, fused_entry, mamba_layers, read_state_groups
from toolkit.models.config.routing import read_groups
from toolkit.models.decoder import Built, assemble, attention, plain_mlp, rms_norm
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, CORRECTION, EXPERT_BLOCK, SHARED_EXPERT, Gguf, Metadata, without
from toolkit.models.gguf_states import (
    MAMBA,
    MAMBA_ENTRY,
    kv_heads,
    mamba_keys,
    mamba_layouts,
    per_layer,
    read_attention,
    read_mamba_keys,
)
from toolkit.models.spec import Activation, DecoderSpec, LayerSpec, LinearSpec, Mixer, MlpSpec, MoeSpec, Sublayer
from toolkit.models.stored import renamed, stored_tensors

MARKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
OTHER = {"linear_attention": "mamba", "full_attention": "attention"}


def build(config: Fields) -> Built:
    kinds = _kinds(config)
    stated = config.changed({"num_hidden_layers": len(kinds)})
    dims = read_dims(stated, eps=1e-5, head_dim=128, kv_heads=8)
    sizes = _mamba(config)
    mamba = mamba_layers(sizes, dims.hidden, dims.eps, least=config.number("time_step_min", default=0.001, low=-1.0))
    act, bias = config.activation("mlp_hidden_act", default="relu2"), config.flag("mlp_bias", False)
    attends = partial(attention, dims=dims, rope=None)
    experts = _experts(config, dims) if "moe" in kinds else None

    def mixer(i: int, kind: str) -> Mixer:
        if kind == "moe":
            assert experts is not None
            return experts(i)
        if kind == "mamba":
            return mamba(f"model.layers.{i}.mamba")
        return attends(i) if kind == "attention" else plain_mlp(i, dims, act, bias)

    norm = partial(rms_norm, eps=dims.eps, size=dims.hidden)
    parts = (Sublayer(mixer(i, kind), norm(f"model.layers.{i}.input_layernorm")) for i, kind in enumerate(kinds))
    spec = assemble(dims, [LayerSpec((part,)) for part in parts], norm("model.norm"))
    return spec, stored_tensors(spec, renamed({}, NAMES), [fused_entry(sizes, "mamba")])


def _kinds(config: Fields) -> list[str]:
    """Of each layer, from a list or a line of marks."""
    pattern = config.values.get("hybrid_override_pattern", "ME*-")
    field = next((name for name in ("layers_block_type", "layer_types") if config.has(name)), None)
    if field is None:
        field, listed = "hybrid_override_pattern", pattern
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(MARKS):
            config.fail(field, pattern, f"a line of {' '.join(MARKS)}, a mark a layer")
        kinds = [MARKS[mark] for mark in pattern]
    else:
        listed = config.values[field]
        count = len(listed) if isinstance(listed, list) else 0
        found = config.choices(field, max(count, 1), (*MARKS.values(), *OTHER)) or []
        kinds = [OTHER.get(kind, kind) for kind in found]
    if not {"mamba", "attention"} & set(kinds):
        config.fail(field, listed, "a layer of mamba or attention among them")
    return kinds


def _mamba(config: Fields) -> MambaDims:
    heads = config.integer("mamba_num_heads", default=128, high=100_000)
    bias = config.flag("use_bias", False)
    check_convolved(config, "mamba_hidden_act")
    return MambaDims(
        heads,
        config.integer("mamba_head_dim", default=64, high=65_536),
        read_state_groups(config, heads, "n_groups", "mamba_n_groups", default=8),
        config.integer("ssm_state_size", default=128, high=65_536),
        config.integer("conv_kernel", "mamba_d_conv", default=4, low=2, high=64),
        bias,
        config.flag("use_conv_bias", True),
        bias,
    )


def _experts(config: Fields, dims: Dims) -> Callable[[int], MoeSpec]:
    if config.has("moe_latent_size"):
        config.fail("moe_latent_size", config.values["moe_latent_size"], "null: experts read the whole hidden state")
    count, top_k = read_experts(config, dims.layers, "n_routed_experts", "num_local_experts")
    groups = read_groups(config, groups=1, kept=1)
    return partial(
        _layer_experts,
        hidden=dims.hidden,
        inner=config.integer("moe_intermediate_size", default=7688),
        shared=config.integer("moe_shared_expert_intermediate_size", default=7688),
        activation=config.activation("mlp_hidden_act", default="relu2"),
        bias=config.flag("mlp_bias", False),
        count=count,
        top_k=top_k,
        norm_topk=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", default=1.0),
        scoring="sigmoid",
        group_score="two" if groups["groups"] > 1 else "best",
        **groups,
    )


def _layer_experts(
    layer: int,
    *,
    hidden: int,
    inner: int,
    shared: int,
    activation: Activation,
    bias: bool,
    count: int,
    top_k: int,
    norm_topk: bool,
    **routing: Any,
) -> MoeSpec:
    prefix = f"model.layers.{layer}.mlp"

    def plain(name: str, inner: int, bias: bool = False) -> MlpSpec:
        up = LinearSpec(f"{prefix}.{name}.up_proj", hidden, inner, bias, "column")
        return MlpSpec(None, up, LinearSpec(f"{prefix}.{name}.down_proj", inner, hidden, bias, "row"), activation)

    return MoeSpec(
        router=LinearSpec(f"{prefix}.gate", hidden, count),
        experts=tuple(plain(f"experts.{e}", inner) for e in range(count)),
        top_k=top_k,
        norm_topk=norm_topk,
        shared=plain("shared_expert", shared, bias),
        correction=f"{prefix}.gate.e_score_correction_bias",
        **routing,
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    inner = [
        x.mlps()[0].up.out_features if x.mlps() else 0 for x in (layer.sublayers[0].mixer for layer in spec.layers)
    ]
    return {**mamba_keys(spec, "nemotron_h"), **kv_heads(spec, "nemotron_h"), "feed_forward_length": per_layer(inner)}


def _write_experts(spec: DecoderSpec) -> dict[str, Any]:
    moe = next(mixer for _, mixer in spec.mixers() if mixer.kind == "moe")
    if moe.groups > 1:
        raise ToolkitError("gguf: files of nemotron_h_moe are read without groups of experts")
    return {
        **_write(spec),
        "expert_shared_count": 1,
        "expert_weights_norm": moe.norm_topk,
        "expert_weights_scale": moe.scale,
        "expert_group_count": 1,
    }


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    kind = "moe" if "n_routed_experts" in config else "mlp"
    layers = zip(read_attention(file, config), file.each("feed_forward_length", count), strict=True)
    kinds = ["attention" if attends else kind if inner else "mamba" for attends, inner in layers]
    sizes = {
        "heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "groups": "n_groups",
        "state": "ssm_state_size",
        "kernel": "conv_kernel",
    }
    return {"layers_block_type": kinds, **read_mamba_keys(file, sizes)}


def _read_experts(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_read(file, config),
        "norm_topk_prob": file.has("expert_weights_norm"),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
    }


PARTS = without(BLOCK, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
EXPERT_PARTS = {theirs: ours for theirs, ours in {**EXPERT_BLOCK, **SHARED_EXPERT}.items() if "ffn_gate_" not in theirs}
GGUF = Gguf(
    "nemotron_h",
    "nemotron_h",
    {**PARTS, **MAMBA, "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    joined=MAMBA_ENTRY,
    biases=False,
    eps="layer_norm_epsilon",
    layouts=mamba_layouts,
    fields={"mlp_hidden_act": "relu2", "use_bias": False, "mlp_bias": False, "time_step_min": 0.0},
    read=_read,
    write=_write,
)
WITH_EXPERTS = replace(
    GGUF,
    arch="nemotron_h_moe",
    names={
        **PARTS,
        **MAMBA,
        **EXPERT_PARTS,
        "ffn_gate_inp": "mlp.gate",
        f"{CORRECTION}.bias": "mlp.gate.e_score_correction_bias",
    },
    norm_topk=None,
    numbers={
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
    read=_read_experts,
    write=_write_experts,
    fits=lambda spec: any(mixer.kind == "moe" for _, mixer in spec.mixers()),
)
NAMES = {
    **{f".{ours}.": ".mixer." for ours in ("self_attn", "mamba", "mlp")},
    "shared_expert.": "shared_experts.",
    "input_layernorm": "norm",
    "model.norm": "backbone.norm_f",
    "model.embed_tokens": "backbone.embeddings",
    "model.layers": "backbone.layers",
}
SIZES = dict(
    num_hidden_layers=None, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    mamba_num_heads=32, mamba_head_dim=4, ssm_state_size=16, n_groups=2, chunk_size=16, head_dim=16,
)  # fmt: skip
EXPERTS = dict(
    SIZES, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64,
)  # fmt: skip
FAMILY = Family(
    "nemotron_h",
    "Nemotron-H, Nemotron Nano 2 and 3",
    ("NemotronHForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(dict(EXPERTS, n_groups=1, routed_scaling_factor=1.5, mlp_bias=True, use_bias=True)),
        Tiny(EXPERTS),
    ),
    replace(GGUF, others=(WITH_EXPERTS,)),
)  # fmt: skip
