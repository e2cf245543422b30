"""StarCoder 1 and SantaCoder: GPT-2 whose heads share one key and value. Source: transformers
``GPTBigCodeForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families.gpt2 import NO_GGUF, SPELLINGS, like_gpt2
from toolkit.models.families.gptj import SIZES, read_gpt_dims
from toolkit.models.family import Family, Tiny
from toolkit.models.stored import fused_by_kv_head, fused_qkv


def build(config: Fields) -> Built:
    dims = read_gpt_dims(config, tied=True)
    shared = config.flag("multi_query", True)
    dims = replace(dims, kv_heads=1 if shared else dims.heads)
    filled = config.filled({"activation_function": "gelu_pytorch_tanh"})
    return like_gpt2(filled, dims, [(fused_qkv if shared else fused_by_kv_head)(dims, "attn.c_attn")])


FAMILY = Family(
    "gpt_bigcode",
    "StarCoder 1B to 15B, SantaCoder",
    ("GPTBigCodeForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(dict(SIZES, multi_query=False, n_inner=96, scale_attn_weights=False)),
    ),
    NO_GGUF,
    spellings=SPELLINGS,
)
