"""GLM-4 9B in transformers' own form: half of each head turns, in neighbouring pairs; gate and up in one matrix.
Source: transformers ``GlmForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import PRE_NORMS, Built, LayerNorms, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, GATE_UP, QKV, Gguf, as_wide_as_the_model, has_qkv_bias, without
from toolkit.models.spec import DecoderSpec
from toolkit.models.stored import fused_gate_up


def build(config: Fields, norms: LayerNorms = PRE_NORMS) -> Built:
    dims = read_dims(config, eps=1.5625e-7, head_dim=128, kv_heads=2)
    return llama_like(
        config,
        dims,
        partial_rotary=0.5,
        qkv_bias=config.flag("attention_bias", True),
        norms=norms,
        fused=[fused_gate_up(dims, "mlp.gate_up_proj")],
        pairs=True,
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    as_wide_as_the_model(spec, "chatglm")
    return {}


NAMES = without(BLOCK, "ffn_gate", "ffn_up")
GGUF = Gguf(
    "chatglm",
    "glm",
    NAMES,
    joined={**QKV, **GATE_UP},
    interleaved_qk=True,
    fields={"hidden_act": "silu"},
    read=lambda file, config: {"attention_bias": has_qkv_bias(file)},
    write=_write,
)
FAMILY = Family(
    "glm",
    "GLM-4 9B (…-hf)",
    ("GlmForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=16)),
        Tiny(dict(head_dim=24, attention_bias=False, num_key_value_heads=1, tie_word_embeddings=True)),
    ),
    GGUF,
)
