"""InternLM 3: Llama with two flags, for the biases of q, k, v and for all others. Source: transformers
``InternLM3Config`` and the model's own ``modeling_internlm3.py``."""

from __future__ import annotations

from toolkit.models.config_fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    bias = config.flag("bias", False)
    return llama_like(config, qkv_bias=config.flag("qkv_bias", False), o_bias=bias, mlp_bias=bias)


BIASES = {"attention_bias": True, "mlp_bias": True}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 2.0}
FAMILY = Family(
    "internlm3",
    "InternLM 3",
    ("InternLM3ForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=24, qkv_bias=True, bias=True), dict(head_dim=24, **BIASES)),
        Tiny(
            dict(rope_theta=50000.0, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            dict(rope_parameters=DYNAMIC),
        ),
    ),
    llama.GGUF,
    twin="llama",
)
