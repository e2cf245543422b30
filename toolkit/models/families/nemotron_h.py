"""Nemotron-H, Nemotron Nano 2 and 3: layers of one part each, Mamba-2, attention without rope, a plain MLP or experts.
Source: transformers ``NemotronHForCausalLM``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.mamba import MambaDims, checked_groups, fused_entry, mamba_layers
from toolkit.models.config.routing import read_groups
from toolkit.models.decoder import (
    Built,
    Dims,
    assemble,
    attention,
    plain_mlp,
    read_dims,
    read_experts,
    rms_norm,
    stored_tensors,
)
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import Activation, LayerSpec, LinearSpec, Mixer, MlpSpec, MoeSpec, Sublayer

MARKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
OTHER = {"linear_attention": "mamba", "full_attention": "attention"}


def build(config: Fields) -> Built:
    kinds = _kinds(config)
    stated = Fields({**config.values, "num_hidden_layers": len(kinds)}, config.source)
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
    return spec, stored_tensors(spec, _on_disk, [fused_entry(sizes, "mamba")])


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
    groups = config.integer("n_groups", "mamba_n_groups", default=8, high=heads)
    bias = config.flag("use_bias", False)
    return MambaDims(
        heads,
        config.integer("mamba_head_dim", default=64, high=65_536),
        checked_groups(config, "n_groups", groups, heads),
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


def _on_disk(name: str) -> str:
    for ours in ("self_attn", "mamba", "mlp"):
        name = name.replace(f".{ours}.", ".mixer.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


NAMES = {
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
FAMILY = Family(
    "nemotron_h",
    "Nemotron-H, Nemotron Nano 2 and 3",
    ("NemotronHForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(
            dict(
                SIZES, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=4,
                num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, n_groups=1,
                routed_scaling_factor=1.5, mlp_bias=True, use_bias=True,
            )
        ),
    ),
    "llama.cpp's nemotron_h has state spaces, which this tool does not write yet",
)  # fmt: skip
