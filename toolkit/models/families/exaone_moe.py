"""EXAONE MoE (K-EXAONE): EXAONE 4's attention with norms before the sublayers, and DeepSeek-V3's experts. Source:
transformers ``ExaoneMoeForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_EXPERTS, Fields
from toolkit.models.config.routing import on_disk, read_corrected, read_routed, sparse_layers
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import exaone4
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=32)
    window = read_window(config, default=4096)
    windows = read_windows(config, dims.layers, window, exaone4.slides(config, dims.layers, window))
    sparse = sparse_layers(config, dims.layers, first=1, listed=True)
    routed = _as_deepseek(config)
    routing = read_corrected(routed)
    make = read_routed(routed, dims, inner=1024, shared=1, norm_topk=True, scale=2.5, sparse=sparse, **routing)
    return llama_like(
        config,
        dims,
        turned=[window is None or seen is not None for seen in windows],
        windows=windows,
        qk_norm=True,
        feed_forward=make,
        rename=lambda name: on_disk(name).replace("mlp.gate.e_score", "mlp.e_score"),
    )


def _as_deepseek(config: Fields) -> Fields:
    """The config with its numbers of experts under DeepSeek's names."""
    stated: dict[str, Any] = {
        "n_routed_experts": config.integer("num_experts", "num_local_experts", default=64, high=MAX_EXPERTS),
        "n_shared_experts": config.integer("num_shared_experts", default=1, low=0, high=MAX_EXPERTS),
        "num_experts_per_tok": config.values.get("num_experts_per_tok", 8),
    }
    return config.changed(stated)


SIZES = dict(
    num_hidden_layers=4, head_dim=32, sliding_window=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3,
)  # fmt: skip
FAMILY = Family(
    "exaone_moe",
    "K-EXAONE 236B-A23B",
    ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    build,
    (
        Tiny(dict(SIZES, sliding_window_pattern=4)),
        Tiny(
            dict(
                SIZES, layer_types=["sliding_attention", "full_attention"] * 2,
                n_group=4, topk_group=2, num_shared_experts=2, head_dim=24,
                num_key_value_heads=1, norm_topk_prob=False, first_k_dense_replace=0,
            )
        ),
    ),
    "its file for llama.cpp's exaone-moe is not written: there is nothing here to try it against",
)  # fmt: skip
