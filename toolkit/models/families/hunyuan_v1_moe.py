"""Hunyuan MoE (A13B): Hunyuan dense with experts in every layer, and one that every token goes through. Source:
transformers ``HunYuanMoEV1ForCausalLM``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import hunyuan_v1_dense
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, SHARED_EXPERT, Gguf, with_experts
from toolkit.models.spec import DecoderSpec
from toolkit.models.stored import renamed

NAMES = {**hunyuan_v1_dense.NAMES, "mlp.gate": "mlp.gate.wg"}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    config.only(use_qk_norm=True, use_cla=False, use_mixed_mlp_moe=True)
    top_k = _one(config, "moe_topk", config.values.get("num_experts_per_tok", 1))
    sized = config.changed({"num_experts": _one(config, "num_experts", 1), "num_experts_per_tok": top_k})
    for name in ("moe_intermediate_size", "num_shared_expert"):
        only = dims.intermediate if name == "moe_intermediate_size" else 1
        if (found := _one(config, name, only)) != only:
            config.fail(name, found, f"{only}, as in all released models")
    return llama_like(
        config,
        dims,
        rope=hunyuan_v1_dense.read_stretched(config, dims.head_dim, dims.max_position),
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        change=lambda i, a: replace(a, norm_last=True),
        feed_forward=read_mixture(sized, dims, "num_experts", norm_topk=True, shared=dims.intermediate),
        rename=renamed(NAMES, {".shared_expert.": ".shared_mlp."}),
    )


def _one(config: Fields, name: str, absent: Any) -> Any:
    """A number, or that of a list with the same one for each layer."""
    value = config.values.get(name, absent)
    if isinstance(value, list):
        if not value or any(x != value[0] for x in value):
            config.fail(name, value, "the same number for each layer")
        return value[0]
    return value


def _write(spec: DecoderSpec) -> dict[str, Any]:
    inner = next(mixer for _, mixer in spec.mixers() if mixer.kind == "moe").experts[0].up.out_features
    return {"expert_feed_forward_length": inner, "expert_shared_feed_forward_length": inner}


SIZES = dict(num_experts=6, moe_topk=3, intermediate_size=64)
FAMILY = Family(
    "hunyuan_v1_moe",
    "Hunyuan A13B",
    ("HunYuanMoEV1ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, head_dim=32, rope_parameters=hunyuan_v1_dense.ALPHA, tie_word_embeddings=True)),
        Tiny(dict(SIZES, head_dim=24, num_key_value_heads=1, moe_topk=1, attention_bias=True)),
    ),
    Gguf(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        with_experts({**BLOCK, **QK_NORMS}, SHARED_EXPERT),
        biases=False,
        fields={"hidden_act": "silu"},
        numbers={"num_experts": "expert_count", "moe_topk": "expert_used_count"},
        write=_write,
    ),
)
