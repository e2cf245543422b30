"""Granite 4: Mamba-2 in most layers, attention in the others, and an MLP or experts with a shared one behind each.
Source: transformers ``GraniteMoeHybridForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.config.dims import check_convolved, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.mamba import fused_entry, mamba_layers, read_mamba
from toolkit.models.config.routing import read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import granite, granitemoe, granitemoeshared
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, SHARED_EXPERT, Metadata, with_experts
from toolkit.models.gguf_states import (
    MAMBA,
    MAMBA_ENTRY,
    MAMBA_FIELDS,
    kv_heads,
    mamba_keys,
    mamba_layouts,
    of_attention,
    read_attention,
    read_mamba_keys,
)
from toolkit.models.spec import AttentionSpec, DecoderSpec, Mixer
from toolkit.models.stored import renamed

NAMES = {**granitemoeshared.SHARED, "mlp.down_proj": "shared_mlp.output_linear", **granitemoe.NAMES}
KINDS = ("mamba", "linear_attention", "attention", "full_attention")


def build(config: Fields) -> Built:
    dims = read_dims(config)
    field = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    kinds = config.choices(field, dims.layers, KINDS) or ["mamba"] * dims.layers
    sizes = read_mamba(config, dims.hidden)
    mamba = mamba_layers(sizes, dims.hidden, dims.eps)
    if not {"mamba", "linear_attention"}.isdisjoint(kinds):
        check_convolved(config, "hidden_act")
    shared = config.integer("shared_intermediate_size", default=1024)
    count = config.integer("num_local_experts", default=8, low=0)
    turned = config.text("position_embedding_type", default="none", choices=("none", "nope", "rope")) == "rope"

    def change(layer: int, attention: AttentionSpec) -> Mixer:
        recurrent = kinds[layer] in ("mamba", "linear_attention")
        return mamba(f"model.layers.{layer}.mamba") if recurrent else attention

    return llama_like(
        config,
        replace(dims, intermediate=shared),
        rope=None if turned else [None] * dims.layers,
        attention_bias=config.flag("attention_bias", False),
        change=change,
        feed_forward=read_mixture(config, dims, "num_local_experts", norm_topk=True, shared=shared) if count else None,
        rename=renamed(NAMES),
        fused=[
            fused_entry(sizes, "mamba"),
            *(granitemoe.stacks(dims, count) if count else ()),
            granitemoeshared.shared_entry("mlp.shared_expert" if count else "mlp", shared),
        ],
        **granite.multipliers(config),
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    attends = read_attention(file, config)
    bias = f"blk.{attends.index(True) if True in attends else 0}.attn_q.bias" in file.tensors
    return {
        **granite.read_gguf(file, config),
        **read_mamba_keys(file, MAMBA_FIELDS),
        "mamba_expand": file.whole("ssm.inner_size") // config["hidden_size"],
        "layer_types": ["full_attention" if x else "linear_attention" for x in attends],
        "attention_bias": bias,
        "position_embedding_type": "rope" if file.has("rope.scaling.finetuned") else "nope",
        "shared_intermediate_size": config.get("shared_intermediate_size", config["intermediate_size"]),
        "num_local_experts": config.get("num_local_experts", 0),
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    arch = "granitehybrid"
    found = {**mamba_keys(spec, arch), **kv_heads(spec, arch)}
    turned = spec.attention_layers()[0][1].rope is not None
    return {**granite.write_gguf(spec), **found, "rope.scaling.finetuned": turned}


def _routed(spec: DecoderSpec) -> bool:
    return any(mixer.kind == "moe" for _, mixer in spec.mixers())


def _plain(spec: DecoderSpec) -> bool:
    """Whether it is Granite as it was before state spaces."""
    turned = all(attention.rope is not None for _, attention in spec.attention_layers())
    return all(of_attention(spec)) and turned and not _routed(spec)


DENSE = replace(
    granite.GGUF,
    arch="granitehybrid",
    family="granitemoehybrid",
    names={**BLOCK, **MAMBA},
    joined=MAMBA_ENTRY,
    layouts=mamba_layouts,
    read=_read,
    write=_write,
)
GGUF = replace(
    DENSE,
    names={**with_experts(BLOCK, SHARED_EXPERT), **MAMBA},
    numbers={
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    },
    others=(
        replace(granite.GGUF, fits=_plain),
        replace(DENSE, fits=lambda spec: not _routed(spec)),
    ),
)
SIZES = dict(
    granite.MULTIPLIERS, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
    mamba_n_heads=32, mamba_d_head=4, mamba_d_state=16, mamba_chunk_size=16, num_local_experts=0, num_experts_per_tok=0,
    shared_intermediate_size=96,
)  # fmt: skip
FAMILY = Family(
    "granitemoehybrid",
    "Granite 4.0 H and dense: 350M to Small",
    ("GraniteMoeHybridForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, tie_word_embeddings=True)),
        Tiny(
            dict(
                SIZES, num_local_experts=4, num_experts_per_tok=2, mamba_n_groups=2, mamba_proj_bias=True,
                position_embedding_type="rope", attention_bias=True, num_key_value_heads=1,
            )
        ),
    ),
    GGUF,
)  # fmt: skip
