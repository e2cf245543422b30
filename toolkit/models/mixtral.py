"""Mixtral: Mistral whose feed-forward is a mixture of experts. Source: arXiv 2401.04088."""

from __future__ import annotations

from toolkit.models.config_fields import Fields
from toolkit.models.decoder import (
    Built,
    assemble,
    attention,
    experts,
    pre_norm_layer,
    read_dims,
    read_experts,
    read_window,
    stored_tensors,
)
from toolkit.models.rope_config import read_rope

EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position, default_theta=1e6)
    window = read_window(config)
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "num_local_experts", "num_experts")
    layers = [
        pre_norm_layer(
            i,
            dims,
            attention(i, dims, rope, window=window),
            experts(i, dims.hidden, dims.intermediate, act, count=count, top_k=top_k, norm_topk=True),
        )
        for i in range(dims.layers)
    ]
    spec = assemble("mixtral", dims, layers)
    return spec, stored_tensors(spec, _rename)


def _rename(name: str) -> str:
    prefix, dot, rest = name.partition(".mlp.")
    if not dot:
        return name
    head, _, last = rest.rpartition(".")
    rest = f"{head}.{EXPERT_NAMES[last]}" if last in EXPERT_NAMES else rest
    return f"{prefix}.block_sparse_moe.{rest}"
