"""CodeGen: GPT-J whose q, v and k stand in one matrix, a quarter of the heads after the other. Source: transformers
``CodeGenForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import Dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families.gptj import SIZES, like_gptj, read_gpt_dims
from toolkit.models.family import Family, Tiny
from toolkit.models.stored import Fused

QUARTERS = 4  # of the heads; the model was trained on as many devices


def build(config: Fields) -> Built:
    dims = read_gpt_dims(config)
    if dims.heads % QUARTERS:
        config.fail("n_head", dims.heads, f"a multiple of {QUARTERS}")
    return like_gptj(config, dims, (_fused(dims),))


def _fused(dims: Dims) -> Fused:
    width = dims.heads * dims.head_dim // QUARTERS
    rows = {
        part: tuple((width * (3 * i + at), width * (3 * i + at + 1)) for i in range(QUARTERS))
        for part, at in (("q", 0), ("k", 2), ("v", 1))
    }
    return Fused("attn.qkv_proj", {f"self_attn.{part}_proj": spans for part, spans in rows.items()})


FAMILY = Family(
    "codegen",
    "CodeGen 350M, 2B, 6B, 16B",
    ("CodeGenForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, rotary_dim=8)),
        Tiny(dict(SIZES, n_head=8, rotary_dim=4, n_inner=96)),
    ),
    "llama.cpp has no such architecture",
)
