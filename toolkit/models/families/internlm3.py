"""InternLM 3: Llama with two flags, for the biases of q, k, v and for all others; transformers 5 writes Llama's two and
means what they do there. Source: transformers ``InternLM3Config`` and the model's own ``modeling_internlm3.py``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, head_dim=128, kv_heads=2)
    if config.has("attention_bias") or config.has("mlp_bias"):
        return llama.build(config, dims)
    bias = config.flag("bias", False)
    return llama_like(config, dims, qkv_bias=config.flag("qkv_bias", False), o_bias=bias, mlp_bias=bias)


SIZES = {"rms_norm_eps": 1e-5}
BIASES = {"attention_bias": True, "mlp_bias": True}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 2.0}
FAMILY = Family(
    "internlm3",
    "InternLM 3",
    ("InternLM3ForCausalLM",),
    build,
    (
        Tiny(
            dict(SIZES, head_dim=16, rope_theta=50000.0, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            dict(SIZES, rope_parameters=DYNAMIC),
        ),
        Tiny(dict(SIZES, head_dim=24, qkv_bias=True, bias=True), dict(SIZES, head_dim=24, **BIASES)),
    ),
    llama.GGUF,
    twin="llama",
)
