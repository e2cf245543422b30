"""Command A+: Command A with experts. Source: transformers ``Cohere2MoeForCausalLM``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from toolkit.models.config.routing import on_disk, read_mixture
from toolkit.models.decoder import PARALLEL_NORM, Built, layer_norm, llama_like, rms_norm
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, tied=True, head_dim=128)
    rms = config.number("rms_norm_eps", default=None, high=0.5)
    dims = replace(dims, eps=config.number("layer_norm_eps", default=1e-5, high=0.5) if rms is None else rms)
    first = config.integer("first_k_dense_replace", default=0, low=0, high=MAX_LAYERS)
    before = config.integer("prefix_dense_sliding_window_pattern", default=1, high=MAX_LAYERS)
    every = config.integer("sliding_window_pattern", default=4, high=MAX_LAYERS)
    slides = [(i + 1) % before != 0 if i < first else (i - first + 1) % every != 0 for i in range(dims.layers)]
    windows = read_windows(config, dims.layers, read_window(config, default=4096), slides)
    kinds = config.choices("mlp_layer_types", dims.layers, ("dense", "sparse"))
    kinds = kinds or ["dense" if i < first else "sparse" for i in range(dims.layers)]
    turns = [windows[i] is not None or (kinds[i] == "dense" and before == 1) for i in range(dims.layers)]
    dense = replace(dims, intermediate=config.integer("prefix_dense_intermediate_size", default=dims.intermediate))
    shared = config.integer("num_shared_experts", default=0, low=0, high=MAX_EXPERTS) * dims.intermediate
    scoring = config.text("expert_selection_fn", default="softmax", choices=("softmax", "sigmoid"))
    spec, stored = llama_like(
        config,
        dense,
        turned=turns,
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        feed_forward=read_mixture(
            config,
            dims,
            sparse=[kind == "sparse" for kind in kinds],
            norm_topk=scoring == "softmax" or config.flag("norm_topk_prob", True),
            scoring=scoring,
            shared=shared,
        ),
        norm=partial(layer_norm if rms is None else rms_norm, eps=dims.eps),
        norms=PARALLEL_NORM,
        parallel=True,
        rename=on_disk,
        pairs=True,
        head_scale=config.number("logit_scale", default=0.0625),
    )
    joined = config.text("shared_expert_combination_strategy", default="average", choices=("average", "sum"))
    if shared and joined == "average":  # of the routed and the shared experts
        spec = spec.changed(lambda _, s: replace(s, residual_scale=0.5) if s.mixer.kind == "moe" else s)
    return spec, stored


SIZES = dict(num_experts=6, num_experts_per_tok=3, intermediate_size=64, head_dim=16, sliding_window=16)
FAMILY = Family(
    "cohere2_moe",
    "Command A+",
    ("Cohere2MoeForCausalLM",),
    build,
    (
        Tiny(
            dict(
                SIZES, logit_scale=0.25, num_hidden_layers=4, first_k_dense_replace=1, num_shared_experts=2,
                sliding_window_pattern=2, prefix_dense_intermediate_size=96, expert_selection_fn="sigmoid",
            )
        ),
        Tiny(
            dict(
                SIZES, logit_scale=0.5, rms_norm_eps=1e-6, attention_bias=True, num_key_value_heads=1,
                num_shared_experts=1, shared_expert_combination_strategy="sum", tie_word_embeddings=False,
            )
        ),
        Tiny(dict(SIZES, logit_scale=0.5, expert_selection_fn="sigmoid", norm_topk_prob=False)),
    ),
    "llama.cpp has no such architecture",
)  # fmt: skip
