"""gpt-oss: experts with biases stacked in one tensor a layer, attention sinks, every other layer sliding.
Source: transformers ``GptOssForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import LOCAL, read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, Metadata, read_betas, with_experts, without
from toolkit.models.spec import DecoderSpec
from toolkit.models.stored import fused_experts, renamed

ROPE = dict(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


def build(config: Fields) -> Built:
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.changed({"rope_scaling": ROPE})
    dims = read_dims(config, eps=1e-5, head_dim=64, kv_heads=8)
    windows = read_windows(
        config, dims.layers, read_window(config, default=128), [i % 2 == 0 for i in range(dims.layers)]
    )
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if (found := config.number(name, default=only)) != only:
            config.fail(name, found, str(only))

    return llama_like(
        config,
        dims,
        theta=150_000.0,
        windows=windows,
        attention_bias=config.flag("attention_bias", True),
        sinks=True,
        feed_forward=read_mixture(config, dims, *LOCAL, activation="swigluoai", norm_topk=True, bias=True),
        rename=renamed({"mlp.gate": "mlp.router"}),
        fused=fused_experts(config.integer(*LOCAL), dims.hidden, dims.intermediate, woven=True, transposed=True),
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    theta, factor = config["rope_theta"], file.number("rope.scaling.factor", 1.0)
    if factor == 1:
        rope = {"rope_type": "default", "rope_theta": theta}
    else:
        length = file.whole("rope.scaling.original_context_length")
        rope = {**ROPE, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": length}
        rope |= read_betas(file)
    return {"rope_parameters": rope, "sliding_window": file.whole("attention.sliding_window")}


def _write(spec: DecoderSpec) -> dict[str, Any]:
    layers = spec.attention_layers()
    rope = layers[0][1].rope
    if rope is not None and rope.kind == "yarn" and rope.truncate:
        raise ToolkitError(
            "gguf: files of gpt-oss are read with the YaRN of the released models, which is not truncated"
        )
    if rope is not None and rope.kind not in ("default", "yarn"):
        raise ToolkitError(f"gguf: files of gpt-oss are read with YaRN, or unscaled; this model's rope is {rope.kind}")
    if any((attention.window is None) != bool(i % 2) for i, attention in layers) or not layers[0][1].q.bias:
        raise ToolkitError("gguf: llama.cpp's gpt-oss slides in every other layer from the first, and has biases")
    return {}


YARN = dict(ROPE, rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
PLAIN = dict(rope_type="default", rope_theta=10000.0)
SIZES = dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
FAMILY = Family(
    "gpt_oss",
    "gpt-oss 20B, 120B",
    ("GptOssForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, rope_parameters=YARN)),
        Tiny(dict(SIZES, rope_parameters=PLAIN, attention_bias=False, layer_types=["full_attention"] * 2)),
    ),
    Gguf(
        "gpt-oss",
        "gpt_oss",
        {
            **with_experts(without(BLOCK, "ffn_norm")),
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        window=True,
        numbers={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        read=_read,
        write=_write,
    ),
)
