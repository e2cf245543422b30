"""Qwen3 MoE: Qwen3 with experts in all layers but ``mlp_only_layers``. Source: transformers ``Qwen3MoeForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_experts, read_window
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import Built, experts, llama_like
from toolkit.models.families import qwen3
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, EXPERT_NUMBERS, QK_NORMS, Gguf, with_experts
from toolkit.models.spec import MoeSpec

EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}


def build(config: Fields) -> Built:
    dims = read_dims(config, kv_heads=4)
    window = read_window(config, default=4096) if config.flag("use_sliding_window", False) else None
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "num_experts", "num_local_experts")
    inner = config.integer("moe_intermediate_size", default=768)
    norm_topk = config.flag("norm_topk_prob", False)
    sparse = sparse_layers(config, dims.layers)

    def feed_forward(i: int) -> MoeSpec | None:
        if i not in sparse:
            return None
        return experts(i, dims.hidden, inner, act, count=count, top_k=top_k, norm_topk=norm_topk)

    return llama_like(
        config,
        dims,
        windows=window,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        feed_forward=feed_forward,
    )


def sparse_layers(config: Fields, layers: int) -> frozenset[int]:
    """The layers with experts."""
    dense = config.indices("mlp_only_layers", layers)
    step = config.integer("decoder_sparse_step", default=1, high=MAX_LAYERS)
    return frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


SIZES = dict(head_dim=32, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True)
FAMILY = Family(
    "qwen3_moe",
    "Qwen 3 30B-A3B, 235B-A22B",
    ("Qwen3MoeForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, num_hidden_layers=3, mlp_only_layers=[1])),
        Tiny(dict(SIZES, tie_word_embeddings=True)),
    ),
    Gguf(
        "qwen3moe",
        "qwen3_moe",
        with_experts({**BLOCK, **QK_NORMS}),
        biases=False,
        fields={**qwen3.FIELDS, **EVERY_LAYER, "norm_topk_prob": True},
        numbers={"num_experts": "expert_count", **EXPERT_NUMBERS},
    ),
)
