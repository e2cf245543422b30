"""Qwen3.5's text model: Qwen3-Next with dense layers, and modules of linear attention that stand apart.
Source: transformers ``Qwen3_5ForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.delta import gated_queries
from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families.qwen3_next import DELTA, NAMES, delta_like
from toolkit.models.family import WITHIN, Family, Tiny
from toolkit.models.gguf import Gguf
from toolkit.models.gguf_states import GATED_QUERIES, delta_in_turn, delta_keys, per_layer, read_delta_keys
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=256, kv_heads=4)
    return delta_like(config, dims, [gated_queries(dims)])


def write_gguf(spec: DecoderSpec, arch: str) -> dict[str, Any]:
    """llama.cpp wants to know which frequencies turn by which of three positions, which text has alike."""
    found = delta_keys(spec, arch)
    given = next((rope.sections or thirds(rope.rotary_dim)) for rope in spec.ropes())
    return {**found, "rope.dimension_sections": per_layer([*given, 0])}


def thirds(rotary_dim: int) -> list[int]:
    """Frequencies that turn by time, row and column, in turn."""
    return [(rotary_dim // 2 + more) // 3 for more in (2, 1, 0)]


GGUF = Gguf(
    "qwen35",
    "qwen3_5_text",
    {**NAMES, "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"},
    joined=GATED_QUERIES,
    biases=False,
    layouts=delta_in_turn,
    fields={"hidden_act": "silu"},
    read=read_delta_keys,
    write=lambda spec: write_gguf(spec, "qwen35"),
    mtp_apart=True,
)
SECTIONS = dict(
    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
)
FAMILY = Family(
    "qwen3_5_text",
    "Qwen3.5 0.8B to 27B (text)",
    ("Qwen3_5ForCausalLM",),
    build,
    (
        Tiny(dict(DELTA, rope_parameters=SECTIONS)),
        Tiny(
            dict(
                DELTA,
                linear_num_key_heads=1,
                linear_num_value_heads=3,
                linear_value_head_dim=32,
                tie_word_embeddings=True,
            )
        ),
    ),
    GGUF,
    spellings=WITHIN,
)
