"""GLM-4 and GLM-Z1 of April 2025: GLM with a second norm after each sublayer. Source: transformers
``Glm4ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, LayerNorms
from toolkit.models.families import glm
from toolkit.models.family import Family

NORMS: LayerNorms = (
    ("input_layernorm", "post_self_attn_layernorm"),
    ("post_attention_layernorm", "post_mlp_layernorm"),
)


def build(config: Fields) -> Built:
    return glm.build(config, NORMS)


FAMILY = Family("glm4", "GLM-4 9B, 32B (0414), GLM-Z1", ("Glm4ForCausalLM",), build, glm.FAMILY.tiny, glm.FAMILY.gguf)
