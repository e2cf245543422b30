"""Molmo: CLIP's tower over tiles that overlap, two of its layers side by side, the means of four patches asking those;
Qwen2 or OLMo 2 behind. Source: the model's own ``modeling_molmo.py``, arXiv 2409.17146."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import BILINEAR, colours
from toolkit.models.decoder import POST_NORMS, PRE_NORMS, Built, llama_like
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import check_grid, clip_tower, seeing, side, stored_vision
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families.llava import TINY_TOWER
from toolkit.models.family import Family, Tiny
from toolkit.models.stored import fused_qkv, joined

TOKEN = "image_token_id"
PLACE = "|<EXTRA_TOKENS_0>|"  # a token that prompts lack; those that they have are beyond the vocabulary
EXTRA, MERGE, SHARED = 128, 2, 2  # tokens of its own; patches along a side a token; tokens over the edge of a tile
BEGIN = "model.vision_backbone."
SPELLING = {
    "patch": "patch_embedding",
    "class": "class_embedding",
    "position": "positional_embedding",
    "pre_norm": "pre_ln",
    "layers": "transformer.resblocks.{}",
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    **{name: f"attention.w{name}" for name in "qkvo"},
    "up": "feed_forward.w1",
    "down": "feed_forward.w2",
    "tokens": "model.transformer.wte.new_embedding",
    "pad": f"{BEGIN}pad_embed",
    **{f"projector.{x}.{kind}": f"image_pooling_2d.w{x}.{kind}" for x in "qkvo" for kind in ("weight", "bias")},
    "projector.gate_proj.weight": "image_projector.w1.weight",
    "projector.up_proj.weight": "image_projector.w3.weight",
    "projector.down_proj.weight": "image_projector.w2.weight",
}
NAMES = {
    "model.embed_tokens": "model.transformer.wte.embedding",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}
ENDS = {
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "mlp.down_proj": "ff_out",
}
ENDS_AFTER = ENDS | {"post_attention_layernorm": "attn_norm", "post_feedforward_layernorm": "ff_norm"}


def language(config: Fields) -> Built:
    after = config.flag("norm_after", False)
    width = config.integer("intermediate_size")
    rows = config.integer("embedding_size", "vocab_size")
    usual = {
        "vocab_size": rows,
        "intermediate_size": width // 2,
        "tie_word_embeddings": config.flag("weight_tying", False),
    }
    config = config.changed({**usual, "rms_norm_eps": config.values.get("layer_norm_eps", 1e-6)})
    dims, ends = read_dims(config), ENDS_AFTER if after else ENDS

    def rename(name: str) -> str:
        if name in NAMES:
            return NAMES[name]
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        return f"model.transformer.blocks.{layer}.{ends.get(inner, inner)}"

    both = joined("ff_proj", {"mlp.up_proj": dims.intermediate, "mlp.gate_proj": dims.intermediate})
    spec, stored = llama_like(
        config,
        dims,
        qkv_bias=config.flag("qkv_bias", True),
        qk_norm="all" if config.flag("attention_layer_norm", False) else False,
        norms=POST_NORMS if after else PRE_NORMS,
        activation="silu",
        rename=rename,
        fused=[fused_qkv(dims, "att_proj"), both],
    )
    return replace(spec, family="qwen2"), [replace(x, bare=x.kind == "embed") for x in stored]


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", {"num_hidden_layers": 23})


def build(config: Fields) -> Built:
    built, inner = language(config), vision_fields(config)
    tower, hidden = clip_tower(inner, post_norm="none", patch_last=True), built[0].hidden_size
    check_grid(inner, tower, MERGE, least=(2 * SHARED + 1) * MERGE)
    taken = inner.values.get("vit_layers", [-2, -9])
    good = isinstance(taken, list) and len(taken) == 2 and all(type(x) is int for x in taken)
    if not good or not -tower.layers <= taken[1] < taken[0] < 0:
        inner.fail("vit_layers", taken, f"two numbers from {-tower.layers} to -1, the later layer first")
    last, also = (tower.layers + x for x in taken)
    tower = replace(tower, taken=last + 1, also=(also,))
    name, width = "vision.projector", config.integer("intermediate_size") // 2
    made = VisionSpec(
        tower,
        (
            Stage("attend", name, tower.outputs, tower.hidden, factor=MERGE, heads=tower.heads),
            Stage("gated", name, tower.hidden, width),
            Stage("linear", f"{name}.down_proj", width, hidden),
        ),
        config.integer(TOKEN, default=151644, high=built[0].vocab_size - 1),
        overlap=SHARED,
        extra=EXTRA,
    )
    shapes = {"vision.patch.weight": (tower.hidden, 3 * tower.patch**2)}
    stored = stored_vision(made, f"{BEGIN}image_vit.", BEGIN.removesuffix("."), SPELLING, shapes)
    return seeing(built, made, stored, {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    tower = vision_fields(config)
    image, patch = side(tower, "image_size", 336), side(tower, "patch_size", 14)
    return Recipe(
        kind="overlap",
        size=(image, image),
        unit=patch * MERGE,
        most=preprocessor.integer("max_crops", default=12, high=256),
        per_tile=(image // (patch * MERGE)) ** 2,
        overlap=SHARED,
        mark=PLACE,
        written=PLACE,
        token=PLACE,
        **colours(preprocessor) | {"resample": BILINEAR},
    )


TOWER = dict(TINY_TOWER, num_hidden_layers=4, image_size=70, vit_layers=[-2, -3])
FAMILY = Family(
    "molmo",
    "Molmo 7B-D, 7B-O, 72B",
    ("MolmoForCausalLM",),
    build,
    (
        Tiny(
            dict(vision_config=TOWER, intermediate_size=256, layer_norm_eps=1e-6, image_token_id=5),
            preprocessor=dict(image_processor_type="MolmoImageProcessor", max_crops=6),
            tokens=(PLACE,),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
    token_fields={TOKEN: PLACE},
)
