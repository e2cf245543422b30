"""What the configs of released models with latent attention say."""

from __future__ import annotations

import math

import pytest

from toolkit.errors import ToolkitError
from toolkit.models.registry import build
from toolkit.models.spec import Latent
from toolkit.models.spec.check import check_spec

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V2 = V2_LITE | {
    "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 160, "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "n_group": 8, "topk_group": 3,
    "topk_method": "group_limited_greedy",
}  # fmt: skip
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8, "topk_group": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "moe_intermediate_size": 2048,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
KIMI_K2 = V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "factor": 32.0, "beta_fast": 1.0},
}  # fmt: skip
MINICPM3 = {
    "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "vocab_size": 73448, "hidden_size": 2560,
    "intermediate_size": 6400, "num_hidden_layers": 62, "num_attention_heads": 40, "num_key_value_heads": 40,
    "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
                     "original_max_position_embeddings": 32768},
}  # fmt: skip


def mscale(factor, share):
    return (0.1 * share * math.log(factor) + 1) ** 2


@pytest.mark.parametrize(
    "config, kept, scale",
    [
        (V2_LITE, 576, 192**-0.5 * mscale(40, 0.707)),
        (V2, 576, 192**-0.5 * mscale(40, 0.707)),
        (V3, 576, 192**-0.5 * mscale(40, 1)),
        (KIMI_K2, 576, 192**-0.5 * mscale(32, 1)),
        (MINICPM3, 288, 96**-0.5),
    ],
    ids=["v2-lite", "v2", "v3", "kimi-k2", "minicpm3"],
)
def test_released_models(config, kept, scale):
    spec, _ = build(config)
    check_spec(spec)
    assert {keeper.kept for keeper in spec.keepers()} == {Latent(kept)}
    assert [len(group.layers) for group in spec.cache_groups] == [config["num_hidden_layers"]]
    attention = spec.layers[0].sublayers[0].mixer
    assert attention.scale == pytest.approx(scale)
    assert (attention.q_a is None) == (config["q_lora_rank"] is None)
    assert {n.eps for n in attention.norms()} == {1e-6}
    dense = [layer.sublayers[1].mixer.kind for layer in spec.layers].count("mlp")
    assert dense == config.get("first_k_dense_replace", len(spec.layers))


def test_routing_of_released_models():
    routed = {name: build(config)[0].layers[-1].sublayers[1].mixer for name, config in
              {"lite": V2_LITE, "v2": V2, "v3": V3, "k2": KIMI_K2}.items()}  # fmt: skip
    groups = {name: (m.groups, m.top_groups, m.group_score) for name, m in routed.items()}
    assert groups == {"lite": (1, 1, "best"), "v2": (8, 3, "best"), "v3": (8, 4, "two"), "k2": (1, 1, "best")}
    assert {name: (m.scoring, m.scale, m.norm_topk) for name, m in routed.items()} == {
        "lite": ("softmax", 1.0, False),
        "v2": ("softmax", 16.0, False),
        "v3": ("sigmoid", 2.5, True),
        "k2": ("sigmoid", 2.827, True),
    }
    assert [m.correction is not None for m in routed.values()] == [False, False, True, True]
    assert routed["lite"].shared.up.out_features == 2816


def test_weights_rescaled_by_the_authors_code_are_not_scaled():
    """Of DeepSeek-V2 it does one or the other."""
    moe = build(V2 | {"norm_topk_prob": True})[0].layers[-1].sublayers[1].mixer
    assert (moe.norm_topk, moe.scale) == (True, 1.0)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ToolkitError, match="n_group: found 7, expected a divisor of the 160 experts"):
        build(V2 | {"n_group": 7})
