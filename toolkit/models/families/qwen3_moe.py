"""Qwen3 MoE: Qwen3 with experts in all layers but ``mlp_only_layers``. Source: transformers ``Qwen3MoeForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.dims import Dims, read_dims, read_window
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.routing import Mixture, read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import qwen3
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, EXPERT_NUMBERS, QK_NORMS, Gguf, with_experts

EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}


def build(config: Fields) -> Built:
    dims = read_dims(config, kv_heads=4)
    window = read_window(config, default=4096) if config.flag("use_sliding_window", False) else None
    return llama_like(
        config,
        dims,
        windows=window,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        feed_forward=read_sparse(config, dims, inner=768, norm_topk=False),
    )


def read_sparse(
    config: Fields, dims: Dims, *, inner: int, norm_topk: bool, shared: int | None = None, **routing: Any
) -> Mixture:
    """``inner``, ``norm_topk``, ``shared``: what the absent width of an expert, ``norm_topk_prob`` and width of the
    expert that all tokens go through mean, None for no such; ``routing``: as of ``experts``."""
    dense = config.indices("mlp_only_layers", dims.layers)
    step = config.integer("decoder_sparse_step", default=1, high=MAX_LAYERS)
    if shared is not None:
        routing["shared"] = config.integer("shared_expert_intermediate_size", default=shared)
    return read_mixture(
        config,
        dims,
        inner=config.integer("moe_intermediate_size", default=inner),
        norm_topk=config.flag("norm_topk_prob", norm_topk),
        sparse=[i not in dense and (i + 1) % step == 0 for i in range(dims.layers)],
        **routing,
    )


SIZES = dict(head_dim=32, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True)
GGUF = Gguf(
    "qwen3moe",
    "qwen3_moe",
    with_experts({**BLOCK, **QK_NORMS}),
    biases=False,
    fields={**qwen3.FIELDS, **EVERY_LAYER, "norm_topk_prob": True},
    numbers={"num_experts": "expert_count", **EXPERT_NUMBERS},
)
FAMILY = Family(
    "qwen3_moe",
    "Qwen 3 30B-A3B, 235B-A22B",
    ("Qwen3MoeForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, num_hidden_layers=3, mlp_only_layers=[1])),
        Tiny(dict(SIZES, tie_word_embeddings=True)),
    ),
    GGUF,
)
