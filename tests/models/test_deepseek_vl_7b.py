"""DeepSeek-VL 7B as published: sizes that its config leaves to the authors' code, and its names of tensors."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.families.multi_modality import recipe
from toolkit.models.registry import build

COLOURS = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
CONFIG: dict[str, Any] = {
    "model_type": "multi_modality",
    "aligner_config": {
        "cls": "MlpProjector",
        "params": {"depth": 2, "input_dim": 1024, "n_embed": 4096, "projector_type": "low_high_hybrid_split_mlp_gelu"},
    },
    "language_config": {"model_type": "llama", "num_hidden_layers": 30, "vocab_size": 102400},
    "vision_config": {
        "cls": "HybridVisionTower",
        "params": {
            "concat_type": "tuple",
            "high_res_cfg": {
                "image_size": 1024, "model_name": "sam_b_downsample", "output_dim": 1024,
                "pixel_mean": COLOURS[0], "pixel_std": COLOURS[1], "select_layer": -1,
            },
            "low_res_cfg": {
                "image_size": 384, "model_name": "siglip_large_patch16_384",
                "pixel_mean": [0.5, 0.5, 0.5], "pixel_std": [0.5, 0.5, 0.5], "select_layer": -1,
            },
        },
    },
}  # fmt: skip
# name -> shape, of the parts that the two forms of the model call otherwise
NAMES = {
    "vision_tower_high.vision_tower.pos_embed": (1, 64, 64, 768),
    "vision_tower_high.vision_tower.patch_embed.proj.weight": (768, 3, 16, 16),
    "vision_tower_high.vision_tower.blocks.11.attn.rel_pos_h": (127, 64),
    "vision_tower_high.vision_tower.blocks.0.attn.rel_pos_w": (27, 64),
    "vision_tower_high.vision_tower.blocks.0.norm2.weight": (768,),
    "vision_tower_high.vision_tower.neck.0.weight": (256, 768, 1, 1),
    "vision_tower_high.vision_tower.neck_hd.3.bias": (256,),
    "vision_tower_high.vision_tower.downsamples.1.weight": (1024, 512, 3, 3),
    "vision_tower_high.vision_tower.hd_alpha_downsamples": (1,),
    "vision_tower_low.vision_tower.pos_embed": (1, 576, 1024),
    "vision_tower_low.vision_tower.blocks.23.attn.qkv.weight": (3072, 1024),
    "vision_tower_low.vision_tower.norm.weight": (1024,),
}


def test_sizes_and_names_are_the_published() -> None:
    spec, stored = build(CONFIG, "config.json")
    shapes = {x.name: x.disk_shape for x in stored}
    assert spec.hidden_size == 4096 and spec.vision is not None and spec.vision.high is not None
    assert {name: shapes[f"vision_model.{name}"] for name in NAMES} == NAMES
    aligner = {"low_up_proj": (2048, 1024), "high_up_proj": (2048, 1024), "layers.1": (4096, 4096)}
    assert {name: shapes[f"aligner.{name}.weight"] for name in aligner} == aligner
    assert "language_model.model.layers.29.mlp.down_proj" in shapes and "language_model.lm_head" in shapes


def test_colours_are_those_of_the_towers() -> None:
    """Of the preprocessor's file, which has the large size's alone and says not to apply them."""
    given = {
        "do_normalize": False,
        "image_size": 1024,
        "image_mean": COLOURS[0],
        "image_std": COLOURS[1],
        "min_size": 14,
    }
    made = recipe(Fields(CONFIG, "config.json"), Fields(given, "preprocessor_config.json"))
    assert (made.size, made.high, made.per_tile) == ((384, 384), 1024, 576)
    assert list(made.mean) == [0.5] * 3 and [list(made.high_mean), list(made.high_std)] == list(COLOURS)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (("vision_config",), "cls", "OtherTower"),
        (("vision_config", "params", "high_res_cfg"), "model_name", "sam_vit_l"),
        (("aligner_config", "params"), "projector_type", "mlp_gelu"),
    ],
)
def test_what_was_never_published_is_refused_by_name(where: tuple[str, ...], name: str, value: str) -> None:
    import copy

    config = copy.deepcopy(CONFIG)
    inner = config
    for step in where:
        inner = inner[step]
    inner[name] = value
    with pytest.raises(ToolkitError, match=f"{name}: .*{value}"):
        build(config, "config.json")
