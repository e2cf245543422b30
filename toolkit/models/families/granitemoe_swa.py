"""Granite Swash MoE: Granite MoE with a shared expert and Granite Swash's attention. Source: transformers
``GraniteMoeSWAForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families import granite_swa, granitemoeshared
from toolkit.models.family import Family, Tiny
from toolkit.models.stored import Fused, fused_experts

NAMES = {
    "mlp.gate": "block_sparse_moe.router",
    "mlp.experts.gate_up_proj": "block_sparse_moe.experts.gate_up_proj",
    "mlp.experts.down_proj": "block_sparse_moe.experts.down_proj",
}


def build(config: Fields) -> Built:
    dims = read_dims(config)
    return granitemoeshared.shared_experts(
        config, dims, **granite_swa.layers(config, dims), names=NAMES, stacks=_stacks
    )


def _stacks(dims: Dims, count: int) -> list[Fused]:
    return fused_experts(count, dims.hidden, dims.intermediate)


SIZES = dict(granitemoeshared.SIZES, **granite_swa.SIZES)
FAMILY = Family(
    "granitemoe_swa",
    "Granite Swash MoE 3B-A600M",
    ("GraniteMoeSWAForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, tie_word_embeddings=True, layer_rope_theta=[0, 1000.0, 50000.0])),
        Tiny(dict(SIZES, num_key_value_heads=1, attention_bias=True)),
    ),
    "llama.cpp's granitemoe has neither sinks nor layers that slide",
)
