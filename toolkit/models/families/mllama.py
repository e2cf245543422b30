"""Llama 3.2 Vision: Llama 3.1 with layers between that look at pictures, a tower over tiles that all see each other.
Source: transformers ``MllamaForConditionalGeneration``, arXiv 2407.21783, section 7. Tokens before the first picture
skip those layers, as texts do and as its authors have it; transformers lets them look at all pictures."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.preprocessor import canvas_recipe
from toolkit.models.decoder import Built, gated_mlp, llama_like, rms_norm
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import PLAIN, activation, clip_tower, seeing, stored_vision
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families.llava import LANGUAGE
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import AttentionSpec, CrossSpec, MlpSpec

MORE = 8  # tokens that only the embedding knows, the mark of a picture among them
TEXT = {
    "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}  # fmt: skip
VISION = {
    "hidden_size": 1280, "attention_heads": 16, "num_hidden_layers": 32, "num_global_layers": 8,
    "intermediate_size": 5120, "image_size": 448, "patch_size": 14, "norm_eps": 1e-5, "max_num_tiles": 4,
    "hidden_act": "gelu", "intermediate_layers_indices": [3, 7, 15, 23, 30],
    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
}  # fmt: skip
SPELLING = PLAIN | {
    "patch": "patch_embedding",
    "class": "class_embedding",
    "position": "gated_positional_embedding.embedding",
    "position_gate": "gated_positional_embedding.gate",
    "tile_position": "gated_positional_embedding.tile_embedding.weight",
    "tile_before": "pre_tile_positional_embedding.embedding.weight",
    "tile_before_gate": "pre_tile_positional_embedding.gate",
    "tile_after": "post_tile_positional_embedding.embedding.weight",
    "tile_after_gate": "post_tile_positional_embedding.gate",
    "pre_norm": "layernorm_pre",
    "post_norm": "layernorm_post",
    "layers": "transformer.layers.{}",
    "over_all": "global_transformer.layers.{}",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "o": "self_attn.o_proj",
    "gate1": "gate_attn",
    "gate2": "gate_ffn",
}


def _cross(layer: int, own: AttentionSpec, dims: Dims) -> CrossSpec:
    prefix = f"model.layers.{layer}.cross_attn"
    q, k, v, o = (replace(x, name=f"{prefix}.{part}_proj") for part, x in zip("qkvo", own.linears(), strict=True))
    q_norm, k_norm = (rms_norm(f"{prefix}.{part}_norm", dims.head_dim, dims.eps) for part in "qk")
    sizes = own.heads, own.kv_heads, own.head_dim
    return CrossSpec(q, k, v, o, *sizes, own.scale, q_norm, k_norm, f"{prefix}_attn_gate")


def language(config: Fields) -> Built:
    text = config.over("text_config", TEXT)
    dims = read_dims(text)
    if dims.tied or config.flag("tie_word_embeddings", False):
        config.fail("tie_word_embeddings", True, "false")
    act, rows = text.activation("hidden_act", default="silu"), dims.vocab
    looks = set(text.indices("cross_attention_layers", dims.layers))
    dims = replace(dims, vocab=rows + MORE)

    def feed_forward(layer: int) -> MlpSpec | None:
        if layer not in looks:
            return None
        made = gated_mlp(f"model.layers.{layer}.mlp", dims.hidden, dims.intermediate, act)
        return replace(made, seen=f"model.layers.{layer}.cross_attn_mlp_gate")

    spec, stored = llama_like(
        text,
        dims,
        theta=500_000.0,
        activation=act,
        change=lambda layer, own: _cross(layer, own, dims) if layer in looks else own,
        feed_forward=feed_forward,
        norm=partial(rms_norm, eps=dims.eps),
        head_rows=rows,
    )
    return spec, [replace(x, shape=(rows, dims.hidden)) if x.kind == "head" else x for x in stored]


def tower_of(config: Fields) -> Tower:
    vision = config.over("vision_config", VISION)
    shapes, gathered = (vision.values[name] for name in ("supported_aspect_ratios", "intermediate_layers_indices"))
    layers = vision.integer("num_hidden_layers", high=MAX_LAYERS)
    tiles = vision.integer("max_num_tiles", high=64)
    pairs = isinstance(shapes, list) and all(isinstance(s, list) and len(s) == 2 for s in shapes)
    if (
        not pairs
        or not all(type(x) is int and x > 0 for s in shapes for x in s)
        or max(a * b for a, b in shapes) > tiles
    ):
        vision.fail("supported_aspect_ratios", shapes, f"rows and columns of up to {tiles} tiles")
    if not isinstance(gathered, list) or not all(type(x) is int and 0 <= x < layers for x in gathered):
        vision.fail("intermediate_layers_indices", gathered, f"numbers of layers below {layers}")
    clip = {"num_attention_heads": vision.values["attention_heads"], "layer_norm_eps": vision.values["norm_eps"]}
    return clip_tower(
        vision.changed(clip),
        activation=activation(vision, "gelu"),
        qkv_bias=False,
        o_bias=False,
        post_norm="used",
        tiles=tiles,
        shapes=tuple((s[0], s[1]) for s in shapes),
        over_all=vision.integer("num_global_layers", high=MAX_LAYERS),
        gathered=tuple(gathered),
    )


def build(config: Fields) -> Built:
    built, tower = language(config), tower_of(config)
    spec = built[0]
    token = config.integer("image_token_index", "image_token_id", default=128256, high=spec.vocab_size - 1)
    projector = (Stage("linear", "vision.projector", tower.outputs, spec.hidden_size, True),)
    made = VisionSpec(tower, projector, token, crossed=True)
    stored = stored_vision(made, "vision_model.", "multi_modal_projector", SPELLING)
    return seeing(built, made, stored, LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return canvas_recipe(config.over("vision_config", VISION), preprocessor, tower_of(config).shapes)


FAMILY = Family(
    "mllama",
    "Llama 3.2 Vision 11B, 90B",
    ("MllamaForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(
                    model_type="mllama_text_model",
                    num_hidden_layers=3,
                    cross_attention_layers=[1],
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                ),
                vision_config=dict(
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=3,
                    num_global_layers=1,
                    attention_heads=2,
                    image_size=28,
                    patch_size=7,
                    intermediate_layers_indices=[0, 2],
                    vision_output_dim=96,
                ),
                image_token_index=5,
            ),
            preprocessor=dict(image_processor_type="MllamaImageProcessor", size={"height": 28, "width": 28}),
            tokens=("<|image|>",),
        ),
    ),
    "llama.cpp has no layers that look at pictures",
    recipe=recipe,
    spellings=(
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head", "lm_head"),
        ("vision_model.", "model.vision_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ),
)
