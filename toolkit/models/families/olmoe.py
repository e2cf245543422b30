"""OLMoE: Llama with experts in every layer, and norms over all heads of q and of k at once. Source: arXiv 2409.02060
and transformers ``OlmoeForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, Gguf, with_experts


def build(config: Fields) -> Built:
    if config.has("clip_qkv"):
        config.fail("clip_qkv", config.values["clip_qkv"], "null, as in all released models")
    dims = read_dims(config, eps=1e-5)
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        qk_norm="all",
        feed_forward=read_mixture(config, dims, norm_topk=config.flag("norm_topk_prob", False)),
    )


SIZES = dict(num_experts=6, num_experts_per_tok=3, intermediate_size=64)
FAMILY = Family(
    "olmoe",
    "OLMoE 1B-7B",
    ("OlmoeForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, num_key_value_heads=4)),
        Tiny(dict(SIZES, num_key_value_heads=1, norm_topk_prob=True, tie_word_embeddings=True)),
    ),
    Gguf(
        "olmoe",
        "olmoe",
        with_experts({**BLOCK, **QK_NORMS}),
        biases=False,
        norm_topk=False,
        fields={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": False},
        numbers={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    ),
)
