"""ERNIE 4.5 with experts: softmax scores that are corrected as experts are chosen, and a shared one. Source:
transformers ``Ernie4_5_MoeForCausalLM``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.routing import on_disk, read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import ernie4_5
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, CORRECTION, EXPERT_BLOCK, SHARED_EXPERT, routing
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, tied=True, kv_heads=4)
    values = {"num_experts_per_tok": config.values.get("moe_k", 6), **config.values}
    routed = Fields(values, config.source, config.prefix)
    inner = config.integer("moe_intermediate_size", default=1536)
    shared = config.integer("moe_num_shared_experts", default=2, low=0)
    first = config.integer("moe_layer_start_index", default=1, low=0, high=MAX_LAYERS)
    last = config.integer("moe_layer_end_index", default=-1, low=-1, high=MAX_LAYERS)
    every = config.integer("moe_layer_interval", default=1, high=MAX_LAYERS)
    config.only(use_bias=False)

    def sparse(i: int) -> bool:
        return i >= first and (last < 0 or i <= last) and (i + 1) % every == 0

    spec, stored = llama_like(
        config,
        dims,
        theta=500_000.0,
        feed_forward=read_mixture(
            routed,
            dims,
            "moe_num_experts",
            "num_experts",
            inner=inner,
            activation=config.activation("hidden_act", default="silu"),
            sparse=[sparse(i) for i in range(dims.layers)],
            shared=shared * inner,
            norm_topk=True,
            correction=True,
        ),
        rename=_on_disk,
        pairs=True,
    )
    return spec, [replace(x, shape=(1, *x.shape)) if x.name.endswith(STATICS) else x for x in stored]


def _on_disk(name: str) -> str:
    return on_disk(name).replace("mlp.gate.e_score_correction_bias", STATICS)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    found = routing(spec, "ernie4_5-moe")
    shared = found.get("expert_shared_count", 0) * found["expert_feed_forward_length"]
    if not shared:
        raise ToolkitError("gguf: llama.cpp's ernie4_5-moe has a shared expert, this model has none")
    stated = ("leading_dense_block_count", "expert_feed_forward_length", "expert_shared_count")
    kept = {name: found[name] for name in stated}
    return {**kept, "expert_shared_feed_forward_length": shared, "interleave_moe_layer_step": 1}


STATICS = "mlp.moe_statics.e_score_correction_bias"
SIZES = dict(
    num_hidden_layers=3, moe_intermediate_size=32, moe_num_experts=6, moe_k=3, moe_num_shared_experts=2,
    num_key_value_heads=2,
)  # fmt: skip
FAMILY = Family(
    "ernie4_5_moe",
    "ERNIE 4.5 21B-A3B, 300B-A47B",
    ("Ernie4_5_MoeForCausalLM",),
    build,
    (Tiny(SIZES), Tiny(dict(SIZES, moe_layer_interval=2, moe_num_shared_experts=0, tie_word_embeddings=False))),
    replace(
        ernie4_5.GGUF,
        arch="ernie4_5-moe",
        family="ernie4_5_moe",
        names={**BLOCK, **EXPERT_BLOCK, **SHARED_EXPERT, f"{CORRECTION}.bias": "mlp.gate.e_score_correction_bias"},
        numbers={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        read=lambda file, config: {
            "moe_layer_start_index": file.stated("leading_dense_block_count", 0),
            "moe_num_shared_experts": (
                file.whole("expert_shared_feed_forward_length") // config["moe_intermediate_size"]
            ),
        },
        write=_write,
    ),
)
