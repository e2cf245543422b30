"""Baichuan-7B: Llama with q, k and v in one matrix. Source: the model's own ``modeling_baichuan.py``.

Only the first release's class: later ones, with another spelling of the name, are in ``baichuan2.py``.
"""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny
from toolkit.models.stored import fused_qkv


def build(config: Fields) -> Built:
    dims = read_dims(config)
    return llama_like(config, dims, fused=[fused_qkv(dims, "self_attn.W_pack")])


FAMILY = Family(
    "baichuan",
    "Baichuan 7B (the first)",
    ("BaiChuanForCausalLM",),
    build,
    (Tiny(dict(num_key_value_heads=4), dict(num_key_value_heads=4)),),
    llama.GGUF,
    twin="llama",
)
