"""LFM2 with experts: of sigmoid scores that are corrected as experts are chosen. Source: transformers
``Lfm2MoeForCausalLM``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.routing import read_mixture
from toolkit.models.decoder import Built
from toolkit.models.families import lfm2
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import CORRECTION, EXPERT_NUMBERS, SIGMOID, Metadata, routing, with_experts
from toolkit.models.gguf_states import short_conv_keys
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = lfm2.read_lfm2_dims(config)
    dense = config.integer("num_dense_layers", default=2, low=0, high=MAX_LAYERS)
    make = read_mixture(
        config,
        dims,
        "num_experts",
        inner=config.integer("moe_intermediate_size", default=1792),
        activation="silu",
        sparse=[i >= dense for i in range(dims.layers)],
        norm_topk=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", default=1.0),
        scoring="sigmoid",
        correction=config.flag("use_expert_bias", True),
    )
    return lfm2.lfm2(config, dims, feed_forward=make)


def _corrected(file: Metadata, layers: int) -> bool:
    return any(f"blk.{i}.{CORRECTION}.bias" in file.tensors for i in range(layers))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    found = routing(spec, "lfm2moe")
    if (scale := found["expert_weights_scale"]) != 1:
        raise ToolkitError(f"gguf: llama.cpp's lfm2moe does not multiply experts' weights, this model does, by {scale}")
    kept = ("leading_dense_block_count", "expert_gating_func", "expert_feed_forward_length")
    return {**short_conv_keys(spec, "lfm2moe"), **{name: found[name] for name in kept}}


SIZES = dict(
    num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=64,
)  # fmt: skip
FAMILY = Family(
    "lfm2_moe",
    "LFM2 8B-A1B, 24B-A2B",
    ("Lfm2MoeForCausalLM",),
    build,
    (Tiny(SIZES), Tiny(dict(SIZES, use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5))),
    replace(
        lfm2.GGUF,
        arch="lfm2moe",
        family="lfm2_moe",
        names={**lfm2.GGUF.names, **with_experts({}), f"{CORRECTION}.bias": "mlp.gate.e_score_correction_bias"},
        numbers={"num_experts": "expert_count", **EXPERT_NUMBERS},
        scoring=SIGMOID,
        read=lambda file, config: {
            **lfm2.read_gguf(file, config),
            "num_dense_layers": file.stated("leading_dense_block_count", 0),
            "use_expert_bias": _corrected(file, config["num_hidden_layers"]),
        },
        write=_write,
    ),
)
