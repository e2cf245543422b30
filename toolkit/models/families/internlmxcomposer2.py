"""InternLM-XComposer 2, 2-4khd and 2.5: CLIP's tower over the whole picture, or over tiles whose lines are put
together, InternLM2 behind, whose linears have a part of low rank for tokens of pictures. Source: the models' own
``build_mlp.py``, arXiv 2401.16420, 2404.06512, 2407.03320; the ranks of 4khd as LMDeploy has them."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import clip_recipe, lined_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, check_grid, clip_tower, mlp, seeing, stored_vision
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families import internlm2
from toolkit.models.families.llava import TINY_TOWER
from toolkit.models.family import Family, Tiny
from toolkit.models.routed import Routed
from toolkit.models.spec import Part, StoredTensor
from toolkit.models.stored import fused_by_kv_head

TOKEN = "image_token_id"
MERGE, RANK, SMALL = 2, 256, 8  # tokens along a side that become one; ranks, the small one of 4khd's q, k and v
SIDE, FINE_SIDE = 560, 336  # of tiles in pixels, the second one 4khd's
TILES, FINE_TILES = 24, 25
SPELLING = {
    **CLIP,
    "newline": "plora_sub_GN",
    "separator": "plora_glb_GN",
    "projector.linear_1": "0",
    "projector.linear_2": "2",
}
THIRDS = tuple(f"self_attn.{x}_proj" for x in "qkv")
MODULES = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def is_fine(config: Fields) -> bool:
    """Whether it is 4khd, of which config.json tells nothing but the name."""
    name = config.values.get("_name_or_path")
    return isinstance(name, str) and "4khd" in name.lower()


def is_whole(config: Fields) -> bool:
    """Whether the tower sees a picture at once: the first models, which state a size."""
    return config.has("img_size") and not is_fine(config)


def vision_fields(config: Fields) -> Fields:
    """Files say nothing of the tower, which is CLIP's with places for one picture or one tile."""
    side = FINE_SIDE if is_fine(config) else config.integer("img_size", default=SIDE, high=1 << 16)
    return config.over("vision_config", {"image_size": side})


def low_rank(dims: Dims, rank: int, small: int) -> list[StoredTensor]:
    """What is stored of it: of q, k and v one of each kind, of rank ``small``, the second with rows head by head."""
    joined = fused_by_kv_head(dims, "attention.wqkv").rows
    heads = (dims.heads + 2 * dims.kv_heads) * dims.head_dim
    sizes = {
        "self_attn.o_proj": (dims.heads * dims.head_dim, dims.hidden),
        "mlp.gate_proj": (dims.hidden, dims.intermediate),
        "mlp.up_proj": (dims.hidden, dims.intermediate),
        "mlp.down_proj": (dims.intermediate, dims.hidden),
    }
    found = []
    for i in range(dims.layers):
        ours, theirs = f"vision.routed.model.layers.{i}.", f"model.layers.{i}."
        a = tuple(Part(f"{ours}{name}.a", ((0, small * dims.hidden),)) for name in joined)
        b = tuple(
            Part(f"{ours}{name}.b", tuple((r[0] * small, r[1] * small) for r in rows)) for name, rows in joined.items()
        )
        begin = f"{theirs}attention.wqkv.Plora_"
        found.append(StoredTensor(f"{begin}A.weight", "vision", (small, dims.hidden), a))
        found.append(StoredTensor(f"{begin}B.weight", "vision", (heads, small), b))
        for name, module in MODULES.items():
            inputs, outputs = sizes[name]
            begin = f"{theirs}{module}.Plora_"
            found.append(StoredTensor(f"{begin}A.weight", "vision", (rank, inputs), (Part(f"{ours}{name}.a"),)))
            found.append(StoredTensor(f"{begin}B.weight", "vision", (outputs, rank), (Part(f"{ours}{name}.b"),)))
    return found


def build(config: Fields) -> Built:
    spec, stored = internlm2.build(config)
    inner, fine = vision_fields(config), is_fine(config)
    rank = config.integer("plora_rank", default=RANK, high=1 << 14)
    small = config.integer("plora_qkv_rank", default=SMALL, high=1 << 14) if fine else rank
    tower = clip_tower(inner)
    token = config.integer(TOKEN, default=0, low=0, high=spec.vocab_size - 1)
    wide = tower.hidden * MERGE**2
    if is_whole(config):
        made = VisionSpec(tower, mlp(tower.hidden, spec.hidden_size, "gelu"), token)
    else:
        check_grid(inner, tower, MERGE)
        stages = (Stage("merge", factor=MERGE), Stage("lines"), *mlp(wide, spec.hidden_size, "gelu"))
        made = VisionSpec(tower, stages, token, join="lined")
    shapes = {"vision.newline": (1, 1, 1, wide), "vision.separator": (1, 1, wide)}
    own = stored_vision(made, "vit.vision_tower.vision_model.", "vision_proj", SPELLING, shapes)
    routed = tuple(
        Routed(x.name, x.in_features, x.out_features, rank=small, scale=2.0)
        if fine and x.name.endswith(THIRDS)
        else Routed(x.name, x.in_features, x.out_features, rank=rank)
        for x in spec.linears()
    )
    stored = [*stored, *low_rank(read_dims(config), rank, small)]
    return seeing((replace(spec, family="internlm2"), stored), replace(made, routed=routed), own, {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    inner, fine = vision_fields(config), is_fine(config)
    if is_whole(config):
        made = clip_recipe(inner, preprocessor, kind="square", token="<unk>")
    else:
        given = preprocessor.filled({"num_crops": FINE_TILES if fine else TILES})
        made = lined_recipe(inner, given, MERGE, token="<unk>")
    return replace(made, below=not fine, mark="<ImageHere>", written="<ImageHere>")


OWN = dict(bias=False, rope_theta=10000.0, plora_rank=8, image_token_id=5)
TOWER = {name: value for name, value in TINY_TOWER.items() if name not in ("model_type", "image_size")}
SEEN = dict(image_processor_type="XComposerImageProcessor", num_crops=4)
FAMILY = Family(
    "internlmxcomposer2",
    "InternLM-XComposer 2, 2-4khd, 2.5",
    ("InternLMXComposer2ForCausalLM",),
    build,
    (
        Tiny(dict(OWN, vision_config=TOWER | dict(image_size=28)), preprocessor=SEEN, tokens=("<unk>",)),
        Tiny(dict(OWN, vision_config=TOWER, img_size=35), preprocessor=SEEN, tokens=("<unk>",)),
        Tiny(
            dict(OWN, _name_or_path="some/4khd", plora_qkv_rank=4, vision_config=TOWER | dict(image_size=28)),
            preprocessor=SEEN,
            tokens=("<unk>",),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
)
