"""What llama.cpp's architectures cannot say of a model: the whole line that ``tool convert --to gguf`` ends with."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.artifacts.gguf.metadata import unsupported
from toolkit.errors import ToolkitError
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.registry import build, build_recipe, get
from toolkit.models.tiny import tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
PHI = LONG | {"short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 128}
SEES, SLIDES = "full_attention", "sliding_attention"
RELEASED = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}  # MiniCPM 3's multipliers


@pytest.mark.parametrize(
    ("family", "fields", "told"),
    [
        ("cohere", {"tie_word_embeddings": False}, "command-r is tied, and norms q and k from 64 layers on"),
        ("cohere2", {"tie_word_embeddings": False}, "cohere2 sees everything in each 4th layer alone, and is tied"),
        ("exaone4", {}, "exaone4 slides in the model of 64 layers alone, in three of every four"),
        (
            "exaone4",
            {"layer_types": ["full_attention"] * 4},
            "exaone4 turns q and k where no layer slides, this model does not",
        ),
        (
            "gemma3_text",
            {"layer_types": None, "sliding_window_pattern": 2},
            "gemma3 sees everything in each 6th layer alone, this model not",
        ),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "gemma3 does not cap logits, this model does"),
        (
            "gemma3_text",
            {"rope_parameters": {SEES: {"rope_type": "default"}, SLIDES: {"rope_type": "linear", "factor": 8.0}}},
            "gemma3 turns layers that slide by an unscaled rope, this model does not",
        ),
        (
            "olmo3",
            {"rope_parameters": {SEES: {"rope_theta": 5e5}, SLIDES: {"rope_theta": 1e4}}},
            "olmo2 turns layers that slide by an unscaled rope of the same base, this model does not",
        ),
        (
            "gemma2",
            {"rope_parameters": {SEES: {"rope_theta": 1e6}, SLIDES: {"rope_theta": 1e4}}},
            "gemma2 turns all layers alike, this model does not",
        ),
        ("gpt_neox", {"attention_bias": False}, "gptneox has biases in its attention, and a head of its own"),
        ("helium", {"attention_bias": True}, "llama has biases of q, k and v with one of o, this model without"),
        (
            "lfm2_moe",
            {"routed_scaling_factor": 2.0},
            "lfm2moe does not multiply experts' weights, this model does, by 2.0",
        ),
        ("minicpm3", {"scale_emb": 3}, "minicpm3 has 12 for scale_emb, this model 3"),
        (
            "minicpm3",
            RELEASED | {"q_lora_rank": None},
            "minicpm3 makes queries from a latent, this model does not",
        ),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "mistral3 turns by YaRN with equal mscale and mscale_all_dim, this model not",
        ),
        ("mpt", {"n_heads": 6, "d_model": 96}, "mpt has other slopes than this model with 6 heads"),
        (
            "granitemoehybrid",
            {"mamba_proj_bias": True},
            "granitehybrid has a bias of convolutions, and none of Mamba's matrices",
        ),
        (
            "falcon_h1",
            {"mamba_norm_before_gate": True, "mamba_rms_norm": True},
            "falcon-h1 norms what is gated, this model before that",
        ),
        ("qwen3_next", {"linear_key_head_dim": 8}, "qwen3next has keys as wide as values, here 8 and 16"),
        ("qwen2_moe", {"norm_topk_prob": True}, "qwen2moe takes the experts' weights as they are; this model does not"),
        (
            "deepseek_v2",
            {"rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}},
            "deepseek2 turns by YaRN with equal mscale and mscale_all_dim alone",
        ),
        (
            "deepseek_v2",
            {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
            "deepseek2 takes groups for as good as their two best experts together",
        ),
        (
            "deepseek",
            {"n_shared_experts": 0},
            "deepseek has experts in all layers after the first, some of them shared",
        ),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0}, "ernie4_5-moe has a shared expert, this model has none"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "ernie4_5-moe has experts in all layers after the first with some"),
        ("glm4_moe", {"first_k_dense_replace": 99}, "glm4moe has experts, this model has none"),
        ("falcon", {"parallel_attn": False}, "falcon has attention and MLP side by side, this model has not"),
        ("gpt_oss", {"attention_bias": False}, "gpt-oss slides in every other layer from the first, and has biases"),
        ("smollm3", {"no_rope_layers": [1] * 4}, "smollm3 has no rope in every layer of 4 alone, this model not"),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
            "qwen3next has attention in every n-th layer, this model in others",
        ),
        (
            "qwen3_moe",
            {"norm_topk_prob": False},
            "qwen3moe has experts in every layer, this model in 2 of them",
        ),
    ],
)
def test_a_model_that_an_architecture_does_not_compute(family: str, fields: dict[str, Any], told: str) -> None:
    spec, _ = build(tiny_config(get(family)) | fields)
    assert unsupported(spec) == f"llama.cpp's {told}"


def test_what_no_architecture_computes() -> None:
    spec, _ = build(tiny_config(get("phimoe")) | {"rope_parameters": PHI})
    assert unsupported(spec) == "llama.cpp has one factor for short and long frequencies, this model two"
    rope = tiny_config(get("gpt_oss"))["rope_parameters"] | {"truncate": True}
    spec, _ = build(tiny_config(get("gpt_oss")) | {"rope_parameters": rope})
    assert unsupported(spec) == (
        "files of gpt-oss are read with the YaRN of the released models, which is not truncated"
    )
    spec, _ = build(tiny_config(get("gpt_oss")) | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    assert unsupported(spec) == "files of gpt-oss are read with YaRN, or unscaled; this model's rope is linear"
    spec, _ = build(tiny_config(get("gemma3_text")) | {"rope_parameters": {SEES: YARN, SLIDES: {"rope_theta": 1e4}}})
    assert unsupported(spec) == "files of gemma3 are read with linear scaling alone; this model's is yarn"
    fields = get("nemotron_h").tiny[1].fields | {
        "n_group": 2,
        "topk_group": 1,
        "use_bias": False,
        "mlp_bias": False,
    }
    spec, _ = build(tiny_config(get("nemotron_h")) | fields)
    assert unsupported(spec) == "files of nemotron_h_moe are read without groups of experts"
    spec, _ = build(tiny_config(get("falcon")) | get("falcon").tiny[4].fields)
    assert unsupported(spec) == "llama.cpp's falcon turns q and k, this model has ALiBi instead"
    spec, _ = build(tiny_config(get("gemma2")) | {"query_pre_attn_scalar": 100})
    assert unsupported(spec) == "llama.cpp scales queries of this architecture by 0.176777, the model by 0.1"


@pytest.mark.parametrize(
    ("family", "fields", "inner", "told"),
    [
        (
            "internvl",
            {},
            {"use_mean_pooling": False},
            "llama.cpp's internvl is InternVL of version 2 and later, with use_mean_pooling",
        ),
        (
            "internvl",
            {},
            {"norm_type": "rms_norm"},
            "llama.cpp's internvl has RMS norms where its tower is 3200 wide and nowhere else",
        ),
        (
            "llava",
            {"multimodal_projector_bias": False},
            {},
            "llama.cpp's mlp has linears with biases, this model's have none",
        ),
        (
            "llava",
            {},
            {"model_type": "pixtral", "head_dim": 16, "rope_theta": 1e4},
            "llama.cpp reads Pixtral in the form of Mistral Small 3.1 alone",
        ),
        (
            "minicpmv",
            {},
            {"image_size": 28},
            "llama.cpp's resampler has 70 x 70 places and heads of 128 numbers",
        ),
        (
            "qwen2_5_vl",
            {},
            {"fullatt_block_indexes": [0, 1]},
            "llama.cpp's qwen2.5vl_merger attends to all in each n-th layer alone",
        ),
        (
            "qwen2_5_vl",
            {},
            {"window_size": 56},
            "llama.cpp's qwen2.5vl_merger has windows of 112 pixels alone",
        ),
        (
            "qwen2_vl",
            {},
            {"spatial_merge_size": 1},
            "llama.cpp's towers of Qwen-VL join 2 x 2 patches, of 2 frames each",
        ),
        (
            "gemma4",
            {},
            {"hidden_activation": "gelu", "patch_size": 16, "position_embedding_size": 1024},
            "llama.cpp's gemma4v has a rope_theta of 100 and gelu_pytorch_tanh",
        ),
    ],
)
def test_eyes_that_llama_cpp_has_not(family: str, fields: dict[str, Any], inner: dict[str, Any], told: str) -> None:
    config = tiny_config(get(family)) | fields
    config["vision_config"] = config["vision_config"] | inner
    vision, recipe, spelling = build(config)[0].vision, build_recipe(config, {}, "config.json", ""), get(family).gguf
    assert vision is not None and recipe is not None and isinstance(spelling, Mmproj)
    with pytest.raises(ToolkitError) as error:
        spelling.write(vision, recipe)
    assert str(error.value) == f"gguf: {told}"
