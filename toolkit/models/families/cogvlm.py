"""CogVLM, CogVLM2: EVA-CLIP's tower as in GLM-4V, Llama behind, whose linears are others for tokens of pictures.
Source: the models' own ``modeling_cogvlm.py``, arXiv 2311.03079."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import seeing, stored_vision
from toolkit.models.families import glm4v_9b
from toolkit.models.family import Family, Tiny
from toolkit.models.routed import Routed
from toolkit.models.spec import RopeSpec
from toolkit.models.stored import fused_qkv, renamed

NAMES = {
    "self_attn.o_proj": "self_attn.language_expert_dense",
    **{f"mlp.{x}_proj": f"mlp.language_mlp.{x}_proj" for x in ("gate", "up", "down")},
}
ROUTED = {
    "routed": "",
    **{f"routed.self_attn.{x}_proj": "self_attn.vision_expert_query_key_value" for x in "qkv"},
    "routed.self_attn.o_proj": "self_attn.vision_expert_dense",
    **{f"routed.mlp.{x}_proj": f"mlp.vision_mlp.{x}_proj" for x in ("gate", "up", "down")},
}
HEADS = "num_multi_query_heads"  # of keys and values; the first version has no such field
TOKEN = "image_token_id"
PLACES = ("<unk>", "<|reserved_special_token_0|>")  # of the first and the second version


def is_second(config: Fields) -> bool:
    return config.has(HEADS)


def build(config: Fields) -> Built:
    second = is_second(config)
    dims = read_dims(config.changed({"num_key_value_heads": config.values.get(HEADS)}))
    rope = RopeSpec(dims.head_dim, 500_000.0 if second else 10_000.0, max_position=dims.max_position)
    fused = [fused_qkv(dims, "self_attn.language_expert_query_key_value")]
    spec, stored = llama_like(config, dims, rope=rope, rename=renamed(NAMES), fused=fused)
    vision = config.inner("vision_config")
    token = config.integer(TOKEN, default=128002 if second else 0, low=0, high=spec.vocab_size - 1)
    tower, begin = glm4v_9b.eva_tower(vision, 2 if second else 1), "model.vision."
    made = glm4v_9b.eye(tower, spec, token, dims.intermediate, 2 if second else 1)
    routed = tuple(
        Routed(x.name, x.in_features, x.out_features, second and x.name.endswith(("q_proj", "k_proj", "v_proj")))
        for x in spec.linears()
    )
    made = replace(made, routed=routed, routed_last=False)
    spelled = {**glm4v_9b.spelled(begin), **ROUTED}
    own = stored_vision(made, begin, begin.removesuffix("."), spelled, glm4v_9b.shapes(made))
    return seeing((replace(spec, family="llama"), stored), made, own, {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    second = is_second(config)
    vision = config.inner("vision_config")
    made = glm4v_9b.square_recipe(vision, 2 if second else 1, PLACES[second])
    return replace(made, leads=("<s>", "<|begin_of_text|>", ""))


FAMILY = Family(
    "cogvlm",
    "CogVLM 17B, CogVLM2 19B",
    ("CogVLMForCausalLM",),
    build,
    (
        Tiny(
            dict(vision_config=glm4v_9b.TINY_EVA, num_multi_query_heads=2, image_token_id=5),
            preprocessor=dict(image_processor_type="CogVLMImageProcessor"),
            tokens=(PLACES[1],),
        ),
        Tiny(
            dict(vision_config=dict(glm4v_9b.TINY_EVA, image_size=21), image_token_id=5),
            preprocessor=dict(image_processor_type="CogVLMImageProcessor"),
            tokens=(PLACES[0],),
        ),
    ),
    "llama.cpp's cogvlm counts positions through a picture, and has neither CogVLM2's convolution nor its grouped keys",
    recipe=recipe,
)
