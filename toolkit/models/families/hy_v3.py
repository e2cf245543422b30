"""Hy3: experts that are corrected as they are chosen, beside one that every token goes through, in all layers but the
first. Source: transformers ``HYV3ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import MAX_EXPERTS, Fields
from toolkit.models.config.routing import read_mixture, sparse_layers
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import (
    BLOCK,
    CORRECTION,
    EXPERT_NUMBERS,
    QK_NORMS,
    SHARED_EXPERT,
    SIGMOID,
    Gguf,
    Metadata,
    with_experts,
)
from toolkit.models.spec import DecoderSpec
from toolkit.models.stored import renamed

NAMES = {"mlp.gate": "mlp.router.gate", "mlp.gate.e_score_correction_bias": "mlp.expert_bias"}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, head_dim=128, kv_heads=8)
    inner = config.integer("moe_intermediate_size", "expert_hidden_dim", default=1536)
    shared = inner * config.integer("num_shared_experts", default=1, high=MAX_EXPERTS)
    config.only(mlp_bias=False)
    return llama_like(
        config,
        dims,
        theta=11_158_840.0,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        feed_forward=read_mixture(
            config,
            dims,
            inner=inner,
            sparse=sparse_layers(config, dims.layers, first=1, listed=True),
            norm_topk=True,
            scale=config.number("router_scaling_factor", default=2.826),
            shared=shared,
            correction=True,
            scoring="sigmoid",
        ),
        rename=renamed(NAMES, {".shared_expert.": ".shared_mlp."}),
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config["moe_intermediate_size"]
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(config["num_hidden_layers"])]
    return {
        "num_shared_experts": file.whole("expert_shared_feed_forward_length", inner) // inner,
        "router_scaling_factor": file.number("expert_weights_scale", 1.0),
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    moe = next(mixer for _, mixer in spec.mixers() if mixer.kind == "moe")
    inner = moe.experts[0].up.out_features
    return {
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
        "expert_weights_scale": moe.scale,
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": inner if moe.shared is None else moe.shared.up.out_features,
    }


SIZES = dict(moe_intermediate_size=32, num_experts=6, num_experts_per_tok=3)
FAMILY = Family(
    "hy_v3",
    "Hy3",
    ("HYV3ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, head_dim=32)),
        Tiny(dict(SIZES, head_dim=24, num_key_value_heads=1, mlp_layer_types=["sparse", "dense"], attention_bias=True)),
    ),
    Gguf(
        "hy_v3",
        "hy_v3",
        {
            **BLOCK,
            **with_experts({}, SHARED_EXPERT),
            **QK_NORMS,
            CORRECTION: "mlp.gate.e_score_correction_bias",
        },
        biases=False,
        norm_topk=None,
        fields={"hidden_act": "silu"},
        numbers={"num_experts": "expert_count", **EXPERT_NUMBERS},
        read=_read,
        write=_write,
    ),
)
