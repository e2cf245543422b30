"""GLM-4V 9B: EVA-CLIP's tower, four patches joined as by a convolution, a gated MLP, learned rows around each picture,
GLM-4 9B behind. Source: the model's own ``visual.py``, arXiv 2406.12793."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import CLIP_MEAN, CLIP_STD
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import activation, check_grid, clip_tower, seeing, side, stored_vision
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families import chatglm
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import DecoderSpec

EVA = {
    "patch": "patch_embedding.proj",
    "class": "patch_embedding.cls_embedding",
    "position": "patch_embedding.position_embedding.weight",
    "layers": "transformer.layers.{}",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    **dict.fromkeys("qkv", "attention.query_key_value"),
    "o": "attention.dense",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "projector.conv.weight": "conv.weight",
    "projector.conv.bias": "conv.bias",
    **{f"projector.{name}": f"linear_proj.{name}" for name in ("linear_proj", "norm1", "gate_proj")},
    "projector.up_proj": "linear_proj.dense_h_to_4h",
    "projector.down_proj": "linear_proj.dense_4h_to_h",
}


def eva_tower(vision: Fields, factor: int) -> Tower:
    """``factor``: patches along a side a token."""
    hidden = vision.integer("hidden_size", default=1792, high=1 << 16)
    own = vision.filled({"num_hidden_layers": 63, "intermediate_size": 15360})
    names = {"num_attention_heads": vision.integer("num_heads", default=16, high=1024), "hidden_size": hidden}
    made = clip_tower(
        own.changed(names),
        activation=activation(vision, "gelu"),
        eps=vision.number("layer_norm_eps", default=1e-6, high=0.5),
        patch_bias=True,
        pre_norm=False,
        post_norm="none",
        norm_after=True,
    )
    check_grid(vision, made, factor)
    return made


def eye(tower: Tower, spec: DecoderSpec, token: int, inner: int, factor: int, scale: float = 1.0) -> VisionSpec:
    """``inner``: width inside the projector; ``factor``: patches along a side a token; ``scale``: of the rows."""
    name, hidden, wide = "vision.projector", spec.hidden_size, tower.hidden * factor**2
    conv = (
        Stage("merge_channels", factor=factor),
        Stage("linear", f"{name}.conv", wide, hidden, True),
    )
    made = VisionSpec(
        tower,
        (
            *(conv if factor > 1 else ()),
            Stage("linear", f"{name}.linear_proj", hidden if factor > 1 else tower.hidden, hidden),
            Stage("layer", f"{name}.norm1", hidden, eps=1e-5),
            Stage("gelu"),
            Stage("gated", name, hidden, inner),
            Stage("linear", f"{name}.down_proj", inner, hidden),
        ),
        token,
        ends=True,
        scale=scale,
        shared=True,
    )
    return made


def spelled(begin: str) -> dict[str, str]:
    return {**EVA, "begin": f"{begin}boi", "end": f"{begin}eoi"}


def shapes(eye: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Of what is stored in another shape."""
    width, hidden = eye.tower.hidden, eye.projector[-1].outputs
    return {
        "vision.class": (1, width),
        "vision.projector.conv.weight": (hidden, width, eye.merge, eye.merge),
        "vision.begin": (1, 1, hidden),
        "vision.end": (1, 1, hidden),
    }


def square_recipe(tower: Fields, factor: int, token: str) -> Recipe:
    """A square of the tower's size, the rows and one before and behind them."""
    image, patch = side(tower, "image_size", 336), side(tower, "patch_size", 14)
    return Recipe(
        kind="square",
        size=(image, image),
        unit=patch * factor,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        per_tile=(image // (patch * factor)) ** 2 + 2,
        mark=token,
        written=token,
        token=token,
    )


def build(config: Fields) -> Built:
    spec, stored = chatglm.build(config)
    vision = config.inner("vision_config")
    tower, scale = eva_tower(vision, 2), 1 / vision.number("scaling_factor", default=8.0)
    token = config.integer("boi_token_id", default=151339, high=spec.vocab_size - 1)
    inner = config.integer("ffn_hidden_size", default=13696, high=1 << 18)
    made, begin = eye(tower, spec, token, inner, 2, scale), "transformer.vision."
    own = stored_vision(made, begin, begin.removesuffix("."), spelled(begin), shapes(made))
    return seeing((replace(spec, family="chatglm"), stored), made, own, {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return square_recipe(config.inner("vision_config"), 2, "<|begin_of_image|>")


TINY_EVA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_heads=2,
    image_size=28,
    patch_size=7,
    hidden_act="gelu",
    layer_norm_eps=1e-6,
)
FAMILY = Family(
    "glm4v_9b",
    "GLM-4V 9B",
    ("ChatGLMModel",),
    build,
    (
        Tiny(
            dict(
                chatglm.SIZES,
                multi_query_group_num=2,
                vision_config=dict(TINY_EVA, scaling_factor=2),
                boi_token_id=5,
                eoi_token_id=6,
            ),
            preprocessor=dict(image_processor_type="GLM4VImageProcessor"),
            tokens=("<|begin_of_image|>", "<|end_of_image|>"),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
)
