"""MiniMax-M2: q and k normed over all heads at once, half of each head turns, experts that are corrected as they are
chosen. Source: transformers ``MiniMaxM2ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import LOCAL, read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import mixtral
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, CORRECTION, QK_NORMS, SIGMOID, Gguf, with_experts
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=128, kv_heads=8)
    config.text("scoring_func", default="sigmoid", choices=("sigmoid",))
    config.text("qk_norm_type", default="per_layer", choices=("per_layer",))
    config.only(use_qk_norm=True, use_routing_bias=True)
    turned = config.integer("rotary_dim", default=dims.head_dim, high=dims.head_dim)

    return llama_like(
        config,
        dims,
        theta=5e6,
        partial_rotary=turned / dims.head_dim,
        qk_norm="all",
        feed_forward=read_mixture(config, dims, *LOCAL, norm_topk=True, scoring="sigmoid", correction=True),
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
