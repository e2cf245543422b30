"""GLM-4 and GLM-Z1 of April 2025: GLM with a second norm after each sublayer. Source: transformers
``Glm4ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, LayerNorms
from toolkit.models.families import glm
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import GATE_UP, Gguf, has_qkv_bias

NORMS: LayerNorms = (
    ("input_layernorm", "post_self_attn_layernorm"),
    ("post_attention_layernorm", "post_mlp_layernorm"),
)


def build(config: Fields) -> Built:
    return glm.build(config, NORMS)


GGUF = Gguf(
    "glm4",
    "glm4",
    {
        **glm.NAMES,
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    joined=GATE_UP,
    interleaved_qk=True,
    fields={"hidden_act": "silu"},
    read=lambda file, config: {"attention_bias": has_qkv_bias(file)},
)
FAMILY = Family(
    "glm4",
    "GLM-4 9B, 32B (0414), GLM-Z1",
    ("Glm4ForCausalLM",),
    build,
    (Tiny(dict(head_dim=32)), glm.FAMILY.tiny[1]),
    GGUF,
)
