"""MiniMax-M2: q and k normed over all heads at once, half of each head turns, experts that are corrected as they are
chosen. Source: transformers ``MiniMaxM2ForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.dims import read_dims, read_experts
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, experts, llama_like
from toolkit.models.families import mixtral
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, CORRECTION, QK_NORMS, SIGMOID, Gguf, with_experts
from toolkit.models.spec import DecoderSpec, MoeSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=128, kv_heads=8)
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "num_local_experts", "num_experts")
    config.text("scoring_func", default="sigmoid", choices=("sigmoid",))
    config.text("qk_norm_type", default="per_layer", choices=("per_layer",))
    config.only(use_qk_norm=True, use_routing_bias=True)
    turned = config.integer("rotary_dim", default=dims.head_dim, high=dims.head_dim)

    def feed_forward(i: int) -> MoeSpec:
        sizes: dict[str, Any] = dict(count=count, top_k=top_k, norm_topk=True, scoring="sigmoid", correction=True)
        return experts(i, dims.hidden, dims.intermediate, act, **sizes)

    return llama_like(
        config,
        dims,
        theta=5e6,
        partial_rotary=turned / dims.head_dim,
        qk_norm="all",
        feed_forward=feed_forward,
        rename=lambda name: mixtral.rename(name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")),
    )


def _inner(spec: DecoderSpec) -> int:
    return spec.layers[0].sublayers[1].mixer.mlps()[0].up.out_features


FAMILY = Family(
    "minimax_m2",
    "MiniMax-M2, M2.1",
    ("MiniMaxM2ForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32, rotary_dim=16, num_local_experts=6, num_experts_per_tok=3)),
        Tiny(dict(head_dim=24, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=1)),
    ),
    Gguf(
        "minimax-m2",
        "minimax_m2",
        {**with_experts(BLOCK, QK_NORMS), f"{CORRECTION}.bias": "mlp.gate.e_score_correction_bias"},
        biases=False,
        fields={"hidden_act": "silu"},
        numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        read=lambda file, config: {"rotary_dim": file.whole("rope.dimension_count", config["head_dim"])},
        write=lambda spec: {"expert_gating_func": SIGMOID, "expert_feed_forward_length": _inner(spec)},
    ),
)
