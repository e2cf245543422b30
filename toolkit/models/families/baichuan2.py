"""Baichuan-13B and Baichuan 2: as the first Baichuan-7B, with ALiBi in the models of 13B and a head of unit rows in
those of the second release. Source: the models' own ``modeling_baichuan.py``.

All files say ``model_type`` baichuan; which model it is stands in the sizes alone.
"""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import MAX_POSITION, Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny
from toolkit.models.positions import alibi_slopes
from toolkit.models.spec import AlibiSpec
from toolkit.models.stored import fused_qkv

FIRST_RELEASE = range(64_000, 125_696)  # tokens of its vocabulary, added ones included
TURNED = 4096  # hidden size of 7B, whose files state the length as others do


def build(config: Fields) -> Built:
    turned = config.has("max_position_embeddings") or config.values.get("hidden_size") == TURNED
    length = config.integer("max_position_embeddings", "model_max_length", default=4096, high=MAX_POSITION)
    dims = read_dims(config.changed({"max_position_embeddings": length}))
    alibi = AlibiSpec(alibi_slopes(dims.heads))
    return llama_like(
        config,
        dims,
        change=None if turned else lambda i, a: replace(a, rope=None, alibi=alibi),
        fused=[fused_qkv(dims, "self_attn.W_pack")],
        unit_head=dims.vocab not in FIRST_RELEASE,
    )


HEADS = dict(num_attention_heads=6, num_key_value_heads=6, hidden_size=96)
FAMILY = Family(
    "baichuan2",
    "Baichuan 13B; Baichuan 2 7B, 13B",
    ("BaichuanForCausalLM",),
    build,
    (
        Tiny(dict(num_key_value_heads=4), dict(num_key_value_heads=4)),
        Tiny(dict(HEADS, max_position_embeddings=None, model_max_length=512), HEADS),
    ),
    llama.GGUF,
    twin="llama",
)
