"""DBRX: layer norms without biases, projections clipped, the matrices of all experts one below the other. Source:
transformers ``DbrxForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import MAX_EXPERTS, MAX_EXPERTS_IN_ALL, MAX_LAYERS, MAX_POSITION, Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, LayerNorms, experts, layer_norm, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import QKV, Gguf, Metadata, as_wide_as_the_model, with_experts
from toolkit.models.spec import DecoderSpec, Rows
from toolkit.models.stored import Fused, fused_qkv, renamed

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.norm_f",
    "self_attn.o_proj": "norm_attn_norm.attn.out_proj",
    "mlp.gate": "ffn.router.layer",
}
NORMS: LayerNorms = (("norm_attn_norm.norm_1", None), ("norm_attn_norm.norm_2", None))


def build(config: Fields) -> Built:
    attention, ffn = config.inner("attn_config"), config.inner("ffn_config")
    dims = _dims(config, attention, ffn)
    theta = attention.number("rope_theta", default=None, low=1.0)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    clip = attention.number("clip_qkv", default=None)
    act = ffn.inner("ffn_act_fn").activation("name")
    count = ffn.integer("moe_num_experts", default=4, high=min(MAX_EXPERTS, MAX_EXPERTS_IN_ALL // dims.layers))
    top_k = ffn.integer("moe_top_k", default=1, high=count)
    sums = ffn.number("moe_normalize_expert_weights", default=None)
    if sums not in (None, 1.0):
        ffn.fail("moe_normalize_expert_weights", sums, "1 or null")
    norm_topk = sums is not None or "moe_normalize_expert_weights" not in ffn.values
    return llama_like(
        config,
        dims,
        rope=rope if theta is None else replace(rope, theta=theta),
        activation=act,
        change=lambda i, a: replace(a, clip=clip),
        feed_forward=lambda i: experts(
            i, dims.hidden, dims.intermediate, act, count=count, top_k=top_k, norm_topk=norm_topk
        ),
        norm=partial(layer_norm, eps=dims.eps),
        norms=NORMS,
        rename=renamed(NAMES, {"model.layers.": "transformer.blocks."}),
        fused=[fused_qkv(dims, "norm_attn_norm.attn.Wqkv"), *_stacks(dims, count)],
    )


def _dims(config: Fields, attention: Fields, ffn: Fields) -> Dims:
    usual = {
        "hidden_size": config.integer("d_model", "hidden_size", default=2048),
        "num_hidden_layers": config.integer("n_layers", "num_hidden_layers", default=24, high=MAX_LAYERS),
        "num_attention_heads": config.integer("n_heads", "num_attention_heads", default=16, high=100_000),
        "num_key_value_heads": attention.integer("kv_n_heads", default=1, high=100_000),
        "intermediate_size": ffn.integer("ffn_hidden_size", default=3584),
        "max_position_embeddings": config.integer(
            "max_seq_len", "max_position_embeddings", default=2048, high=MAX_POSITION
        ),
        "head_dim": None,
    }
    config.only(tie_word_embeddings=False)
    return read_dims(config.changed(usual), eps=1e-5)


def _stacks(dims: Dims, count: int) -> list[Fused]:
    """``w1`` (gate), ``v1`` (up) and ``w2`` (down, transposed), each [experts · inner, hidden]."""
    inner, hidden, prefix = dims.intermediate, dims.hidden, "mlp.experts"
    shape = (count, inner, hidden)

    def rows(name: str, size: int) -> dict[str, Rows]:
        return {f"{prefix}.{e}.{name}_proj": ((size * e, size * (e + 1)),) for e in range(count)}

    return [
        Fused("ffn.experts.mlp.w1", rows("gate", inner), shape, bare=True, flat=True),
        Fused("ffn.experts.mlp.v1", rows("up", inner), shape, bare=True, flat=True),
        Fused("ffn.experts.mlp.w2", rows("down", hidden), shape, transposed=True, bare=True, flat=True),
    ]


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "d_model": config["hidden_size"],
        "n_heads": config["num_attention_heads"],
        "n_layers": config["num_hidden_layers"],
        "max_seq_len": config["max_position_embeddings"],
        "attn_config": {
            "clip_qkv": file.number("attention.clamp_kqv"),
            "kv_n_heads": config["num_key_value_heads"],
            "rope_theta": config["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "moe_num_experts": file.whole("expert_count"),
            "moe_top_k": file.whole("expert_used_count"),
        },
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    as_wide_as_the_model(spec, "dbrx")
    first = spec.attention_layers()[0][1]
    return {"attention.clamp_kqv": first.clip} if first.clip is not None else {}


ATTENTION = dict(clip_qkv=0.7, kv_n_heads=2, rope_theta=10000.0)
SIZES = dict(d_model=64, n_heads=4, n_layers=2)
FFN = dict(ffn_hidden_size=64, moe_num_experts=6, moe_top_k=3)
FAMILY = Family(
    "dbrx",
    "DBRX 132B-A36B",
    ("DbrxForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, attn_config=ATTENTION, ffn_config=FFN)),
        Tiny(
            dict(
                SIZES,
                attn_config=dict(ATTENTION, clip_qkv=1.5, kv_n_heads=1),
                ffn_config=dict(FFN, moe_normalize_expert_weights=None),
            )
        ),
    ),
    Gguf(
        "dbrx",
        "dbrx",
        with_experts(
            {
                "attn_norm": "norm_attn_norm.norm_1",
                "attn_output": "self_attn.o_proj",
                "attn_output_norm": "norm_attn_norm.norm_2",
            }
        ),
        biases=False,
        joined=QKV,
        eps="layer_norm_eps",
        fields={"hidden_act": "silu"},
        read=_read,
        write=_write,
    ),
)
