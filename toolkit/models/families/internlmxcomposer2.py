"""InternLM-XComposer 2.5: CLIP's tower over tiles whose lines are put together, InternLM2 behind, whose linears have a
part of low rank for tokens of pictures. Source: the model's own ``build_mlp.py``, arXiv 2407.03320."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import lined_recipe
from toolkit.models.decoder import Built
from toolkit.models.families import internlm2
from toolkit.models.families.llava import TINY_TOWER
from toolkit.models.family import Family, Tiny
from toolkit.models.pictures import Recipe
from toolkit.models.routed import Routed
from toolkit.models.spec import Part, StoredTensor
from toolkit.models.stored import fused_by_kv_head
from toolkit.models.towers import CLIP, check_grid, clip_tower, mlp, seeing, stored_vision, taken_layers
from toolkit.models.vision import Stage, VisionSpec

TOKEN = "image_token_id"
MERGE, RANK, TILES = 2, 256, 24
SPELLING = {
    **CLIP,
    "newline": "plora_sub_GN",
    "separator": "plora_glb_GN",
    "projector.linear_1": "0",
    "projector.linear_2": "2",
}
MODULES = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def vision_fields(config: Fields) -> Fields:
    """Files say nothing of the tower, which is CLIP's with places for tiles of 560 pixels."""
    inner = config.inner("vision_config")
    return Fields({"image_size": 560} | dict(inner.values), config.source, "vision_config.")


def low_rank(dims: Dims, rank: int) -> list[StoredTensor]:
    """What is stored of it: of q, k and v one of each kind, the second with rows head by head."""
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
        a = tuple(Part(f"{ours}{name}.a", ((0, rank * dims.hidden),)) for name in joined)
        b = tuple(
            Part(f"{ours}{name}.b", tuple((r[0] * rank, r[1] * rank) for r in rows)) for name, rows in joined.items()
        )
        begin = f"{theirs}attention.wqkv.Plora_"
        found.append(StoredTensor(f"{begin}A.weight", "vision", (rank, dims.hidden), a))
        found.append(StoredTensor(f"{begin}B.weight", "vision", (heads, rank), b))
        for name, module in MODULES.items():
            inputs, outputs = sizes[name]
            begin = f"{theirs}{module}.Plora_"
            found.append(StoredTensor(f"{begin}A.weight", "vision", (rank, inputs), (Part(f"{ours}{name}.a"),)))
            found.append(StoredTensor(f"{begin}B.weight", "vision", (outputs, rank), (Part(f"{ours}{name}.b"),)))
    return found


def build(config: Fields) -> Built:
    spec, stored = internlm2.build(config)
    inner, rank = vision_fields(config), config.integer("plora_rank", default=RANK, high=1 << 14)
    tower = clip_tower(inner)
    check_grid(inner, tower, MERGE)
    tower = replace(tower, taken=taken_layers(Fields({}), tower.layers, -1))
    wide = tower.hidden * MERGE**2
    routed = tuple(Routed(x.name, x.in_features, x.out_features, rank=rank) for x in spec.linears())
    made = VisionSpec(
        tower,
        (Stage("merge", factor=MERGE), Stage("lines"), *mlp(wide, spec.hidden_size, "gelu")),
        config.integer(TOKEN, default=0, low=0, high=spec.vocab_size - 1),
        join="lined",
    )
    shapes = {"vision.newline": (1, 1, 1, wide), "vision.separator": (1, 1, wide)}
    own = stored_vision(made, "vit.vision_tower.vision_model.", "vision_proj", SPELLING, shapes)
    made = replace(made, routed=routed)
    return seeing((replace(spec, family="internlm2"), stored), made, [*own, *low_rank(read_dims(config), rank)], {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    values = {"num_crops": TILES} | dict(preprocessor.values)
    made = lined_recipe(vision_fields(config), Fields(values, preprocessor.source), MERGE, token="<unk>")
    return replace(made, below=True, mark="<ImageHere>", written="<ImageHere>")


FAMILY = Family(
    "internlmxcomposer2",
    "InternLM-XComposer 2.5",
    ("InternLMXComposer2ForCausalLM",),
    build,
    (
        Tiny(
            dict(
                bias=False,
                rope_theta=10000.0,
                vision_config={k: v for k, v in TINY_TOWER.items() if k != "model_type"},
                plora_rank=8,
                image_token_id=5,
            ),
            preprocessor=dict(image_processor_type="XComposerImageProcessor", num_crops=4),
            tokens=("<unk>",),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
)
