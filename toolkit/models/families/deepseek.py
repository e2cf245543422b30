"""DeepSeek-MoE: Llama with experts in all but the first layers, and some that every token goes through.
Source: arXiv 2401.06066 and the model's own ``modeling_deepseek.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import MAX_EXPERTS, Fields
from toolkit.models.config.routing import on_disk, read_mixture, sparse_layers
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, EXPERT_NUMBERS, SHARED_EXPERT, Gguf, Metadata, with_experts
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_dims(config)
    config.text("scoring_func", default="softmax", choices=("softmax",))
    inner = config.integer("moe_intermediate_size", default=1407)
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        feed_forward=read_mixture(
            config,
            dims,
            "n_routed_experts",
            inner=inner,
            shared=inner * config.integer("n_shared_experts", default=0, low=0, high=MAX_EXPERTS),
            norm_topk=config.flag("norm_topk_prob", False),
            sparse=sparse_layers(config, dims.layers, first=0, stepped=True),
        ),
        rename=on_disk,
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"first_k_dense_replace": file.stated("leading_dense_block_count", 0)}


def _write(spec: DecoderSpec) -> dict[str, Any]:
    sparse = [layer.sublayers[1].mixer.kind == "moe" for layer in spec.layers]
    first = sparse.index(True)
    moe = spec.layers[first].sublayers[1].mixer
    assert moe.kind == "moe"
    if not all(sparse[first:]) or moe.shared is None:
        raise ToolkitError("gguf: llama.cpp's deepseek has experts in all layers after the first, some of them shared")
    return {
        "leading_dense_block_count": first,
        "expert_shared_count": moe.shared.up.out_features // moe.experts[0].up.out_features,
        "expert_weights_scale": 1.0,
    }


SIZES = dict(num_experts_per_tok=3, moe_intermediate_size=32)
TWIN = dict(SIZES, num_experts=6, shared_expert_intermediate_size=64, qkv_bias=False)
FAMILY = Family(
    "deepseek",
    "DeepSeek-MoE 16B",
    ("DeepseekForCausalLM",),
    build,
    (
        Tiny(
            dict(SIZES, n_routed_experts=6, n_shared_experts=2, first_k_dense_replace=1, num_hidden_layers=3),
            dict(TWIN, mlp_only_layers=[0], num_hidden_layers=3),
        ),
        Tiny(
            dict(SIZES, n_routed_experts=6, n_shared_experts=2, norm_topk_prob=True, num_key_value_heads=4),
            dict(TWIN, norm_topk_prob=True, num_key_value_heads=4),
        ),
    ),
    Gguf(
        "deepseek",
        "deepseek",
        {**BLOCK, **with_experts(BLOCK, SHARED_EXPERT)},
        interleaved_qk=True,
        biases=False,
        norm_topk=False,
        fields={"hidden_act": "silu", "moe_layer_freq": 1, "norm_topk_prob": False},
        numbers={"n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count", **EXPERT_NUMBERS},
        read=_read,
        write=_write,
    ),
    twin="qwen2_moe",
)
