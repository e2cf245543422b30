"""LLaVA 1.5 and 1.6 as their authors publish them: the tower among the language model's tensors, fields in one object.
Source: the LLaVA repository's ``llava_arch.py``; the files of 1.5 lack the tower (``llava-hf`` has them whole)."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import canvases, clip_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, language_of, seeing, stored_vision
from toolkit.models.eyes.vision import Stage
from toolkit.models.families import llava, llava_next
from toolkit.models.family import Family, Tiny

LANGUAGES = {"LlavaLlamaForCausalLM": "llama", "LlavaMistralForCausalLM": "mistral"}
TOKEN = "image_token_index"
PROJECTORS = ("mlp2x_gelu", "mlp2x_gelu_Norm")  # the second one Yi-VL's
CLIP_H = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "image_size": 448,
    "hidden_act": "gelu",
}
NORMED = {"projector.norm_1": "1", "projector.linear_3": "3", "projector.norm_2": "4"}
BEGIN = "model.vision_tower.vision_tower.vision_model."
SPELLING = {**CLIP, "newline": "model.image_newline", "projector.linear_1": "0", "projector.linear_2": "2"}


def is_yi(config: Fields) -> bool:
    return config.values.get("mm_projector_type") == PROJECTORS[1]


def vision_fields(config: Fields) -> Fields:
    """Where files say nothing of the tower it is CLIP's, of Yi-VL the large one's at 448 pixels."""
    return config.over("vision_config", CLIP_H if is_yi(config) else {})


def cuts(config: Fields) -> bool:
    """Whether pictures are cut into tiles."""
    ratio = config.text("image_aspect_ratio", default="square", choices=("square", "pad", "anyres"))
    if ratio == "anyres" and config.values.get("mm_patch_merge_type") != "spatial_unpad":
        config.fail("mm_patch_merge_type", config.values.get("mm_patch_merge_type"), "spatial_unpad")
    return ratio == "anyres"


def build(config: Fields) -> Built:
    if config.values.get("mm_projector_type") not in PROJECTORS:
        config.fail("mm_projector_type", config.values.get("mm_projector_type"), " or ".join(PROJECTORS))
    names = config.values.get("architectures") or [""]
    if config.has("text_config"):  # of a GGUF file
        language = language_of(config)
    else:
        language = language_of(config, None, model_type=LANGUAGES.get(names[0], "llama"), architectures=None)
    layer, tower = config.values.get("mm_vision_select_layer"), dict(vision_fields(config).values)
    join = "anyres" if cuts(config) else "tiles"
    as_llava = config.changed({"vision_feature_layer": layer, "vision_config": tower})
    made, _ = llava.parts(as_llava, language[0], token=0, join=join)
    spelled = SPELLING
    if is_yi(config):
        hidden, spelled = language[0].hidden_size, SPELLING | NORMED
        norms = (Stage("layer", f"vision.projector.norm_{i}", hidden, eps=1e-5) for i in (1, 2))
        one, act, two = made.projector
        two = replace(two, name="vision.projector.linear_3")
        made = replace(made, projector=(one, next(norms), act, two, next(norms)))
    return seeing(language, made, stored_vision(made, BEGIN, "model.mm_projector", spelled), {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    inner = vision_fields(config)
    if cuts(config):
        sizes = canvases(config, llava_next.CANVASES, inner)
        made = clip_recipe(inner, preprocessor, kind="anyres", canvases=sizes, pad=False)
    else:
        made = clip_recipe(inner, preprocessor, pad=config.values.get("image_aspect_ratio") == "pad")
    return replace(made, token="<unk>")


OWN = dict(
    mm_projector_type="mlp2x_gelu",
    mm_vision_select_layer=-2,
    vision_config=llava.TINY_TOWER,
    image_token_index=5,
)
NEXT = llava_next.FAMILY.tiny[0]
FAMILY = Family(
    "llava_llama",
    "LLaVA 1.5, 1.6 as published (Vicuna, Mistral, Yi), Yi-VL",
    tuple(LANGUAGES),
    build,
    (
        Tiny(
            OWN | dict(image_aspect_ratio="pad"),
            llava.FAMILY.tiny[0].fields,
            {**llava.FAMILY.tiny[0].preprocessor, "do_pad": True},
            ("<unk>",),
        ),
        Tiny(
            OWN
            | dict(
                image_aspect_ratio="anyres",
                mm_patch_merge_type="spatial_unpad",
                image_grid_pinpoints=NEXT.fields["image_grid_pinpoints"],
            ),
            {**NEXT.fields, "model_type": "llava_next", "text_config": dict(model_type="llama")},
            NEXT.preprocessor,
            ("<unk>",),
        ),
        Tiny(
            OWN | dict(image_aspect_ratio="pad", mm_projector_type=PROJECTORS[1]),
            preprocessor={**llava.FAMILY.tiny[0].preprocessor, "do_pad": True},
            tokens=("<unk>",),
        ),
    ),
    llava.MLP,
    twin="llava",
    recipe=recipe,
    token_fields={TOKEN: "<unk>"},
)
