"""Mixtral: Mistral whose feed-forward is a mixture of experts. Source: arXiv 2401.04088."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_window
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import LOCAL, read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, with_experts

EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=8)
    return llama_like(
        config,
        dims,
        theta=1e6,
        windows=read_window(config),
        feed_forward=read_mixture(config, dims, *LOCAL, norm_topk=True),
        rename=rename,
    )


def rename(name: str) -> str:
    """A canonical name as Mixtral's checkpoints spell it."""
    prefix, dot, rest = name.partition(".mlp.")
    if not dot:
        return name
    head, _, last = rest.rpartition(".")
    rest = f"{head}.{EXPERT_NAMES[last]}" if last in EXPERT_NAMES else rest
    return f"{prefix}.block_sparse_moe.{rest}"


FAMILY = Family(
    "mixtral",
    "Mixtral 8x7B, 8x22B",
    ("MixtralForCausalLM",),
    build,
    (Tiny(dict(num_local_experts=4, num_experts_per_tok=2)),),
    Gguf(  # which llama.cpp takes for a llama with experts
        "llama",
        "mixtral",
        with_experts(BLOCK),
        interleaved_qk=True,
        fields={"hidden_act": "silu", "sliding_window": None},
        numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    ),
)
