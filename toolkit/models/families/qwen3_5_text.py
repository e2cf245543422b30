"""Qwen3.5's text model: Qwen3-Next with dense layers, and modules of linear attention that stand apart.
Source: transformers ``Qwen3_5ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.delta import gated_queries
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, read_dims
from toolkit.models.families.qwen3_next import DELTA, delta_like
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=256, kv_heads=4)
    return delta_like(config, dims, [gated_queries(dims)])


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
    "llama.cpp's qwen35 has linear attention, which this tool does not write yet",
)
