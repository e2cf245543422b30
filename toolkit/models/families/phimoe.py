"""Phi-3.5-MoE: layer norms, biases in attention and of the head, two experts a token that are weighed apart. Source:
arXiv 2409.12136, the model's own ``modeling_phimoe.py`` and transformers ``PhimoeForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims, read_window
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.config.routing import LOCAL, read_mixture
from toolkit.models.decoder import Built, layer_norm, llama_like
from toolkit.models.families import mixtral
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, Metadata, as_wide_as_the_model, has_qkv_bias, with_experts
from toolkit.models.spec import DecoderSpec, RopeSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=8)
    head_bias = config.flag("lm_head_bias", False)
    if head_bias and dims.tied:
        config.fail("tie_word_embeddings", True, "false: the head has a bias")
    jitter = max(config.number("router_jitter_noise", default=JITTER, low=-1.0, high=1.0), 0.0)
    make = read_mixture(config, dims, *LOCAL, norm_topk=False, scoring="sparsemixer", jitter=jitter)
    if (top_k := config.integer("num_experts_per_tok")) != 2:
        config.fail("num_experts_per_tok", top_k, "2, as in all released models")
    return llama_like(
        config,
        dims,
        rope=_rope(config, dims.head_dim, dims.max_position),
        windows=read_window(config),
        attention_bias=config.flag("attention_bias", False),
        feed_forward=make,
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        rename=mixtral.rename,
        head_bias=head_bias,
    )


def _rope(config: Fields, head_dim: int, max_position: int) -> RopeSpec:
    """Each set of frequencies has a factor of its own."""
    rope = read_rope(config, head_dim=head_dim, max_position=max_position, default_theta=1e6)
    if rope.kind == "default":
        return rope
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters")
    assert scaling is not None
    short, long = (scaling.number(f"{name}_mscale", default=rope.attention_factor) for name in ("short", "long"))
    return replace(rope, attention_factor=short, long_attention_factor=long)


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    window = file.stated("attention.sliding_window", None)
    head_bias = "output.bias" in file.tensors
    return {"sliding_window": window, "attention_bias": has_qkv_bias(file), "lm_head_bias": head_bias}


def _write(spec: DecoderSpec) -> dict[str, Any]:
    as_wide_as_the_model(spec, "phimoe")
    if not (spec.head_bias and all(a.o.bias for _, a in spec.attention_layers())):
        raise ToolkitError("gguf: llama.cpp's phimoe has biases in attention and of the head, this model has not")
    if odd := next((m.jitter for _, m in spec.mixers() if m.kind == "moe" and m.jitter != JITTER), None):
        raise ToolkitError(f"gguf: router_jitter_noise is {JITTER} in every file, this model's is {odd:g}")
    if any(r.attention_factor != r.long_attention_factor for r in spec.ropes()):
        raise ToolkitError("gguf: llama.cpp has one factor for short and long frequencies, this model two")
    return {}


JITTER = 0.01
LONG: dict[str, Any] = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0 + 0.2 * i for i in range(8)],
    long_factor=[1.0 + 0.5 * i for i in range(8)],
    short_mscale=1.2,
    long_mscale=1.2,
    original_max_position_embeddings=64,
)
ODD = {"short_factor": [1.0 + 0.15 * i for i in range(10)], "long_factor": [1.0 + 0.7 * i for i in range(10)]}
APART = {"short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [1.0 + i for i in range(16)]}
SIZES = dict(num_local_experts=6, num_experts_per_tok=2)
FAMILY = Family(
    "phimoe",
    "Phi 3.5 MoE",
    ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    build,
    (
        Tiny(dict(SIZES, rope_parameters=LONG, attention_bias=True, lm_head_bias=True)),
        Tiny(
            dict(
                SIZES,
                head_dim=32,
                num_key_value_heads=1,
                rope_parameters={**LONG, **APART, "long_mscale": 1.3},
                router_jitter_noise=0.5,
                tie_word_embeddings=True,
            )
        ),
        Tiny(dict(SIZES, head_dim=20, num_attention_heads=6, num_key_value_heads=2, rope_parameters={**LONG, **ODD})),
    ),
    Gguf(
        "phimoe",
        "phimoe",
        with_experts(BLOCK),
        window=True,
        idle_window=True,
        norm_topk=None,
        fields={"hidden_act": "silu"},
        numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        read=_read,
        write=_write,
        differs="norms by the root mean square alone and weighs experts by softmax",
    ),
)
