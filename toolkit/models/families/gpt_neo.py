"""GPT-Neo: GPT-2 with plain matrices, every second layer slides, scores are not scaled. Source: transformers
``GPTNeoForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import read_other_dims
from toolkit.models.config.fields import MAX_POSITION, Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.encoder import POSITIONS
from toolkit.models.families import gpt2
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec
from toolkit.models.stored import renamed

KINDS = ("global", "local")
NAMES = gpt2.NAMES | {
    **{f"self_attn.{part}_proj": f"attn.attention.{part}_proj" for part in "qkv"},
    "self_attn.o_proj": "attn.attention.out_proj",
}


def build(config: Fields) -> Built:
    dims = read_other_dims(
        config,
        hidden=("hidden_size",),
        layers=("num_layers", "num_hidden_layers"),
        heads=("num_heads", "num_attention_heads"),
        inner=lambda width: config.integer("intermediate_size", default=4 * width),
        tied=True,
    )
    act = config.activation("activation_function", default="gelu_new")
    slides = [kind == "local" for kind in _kinds(config, dims.layers)]
    window = config.integer("window_size", default=256, high=MAX_POSITION)
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        windows=[window if own else None for own in slides],
        o_bias=True,
        activation=act,
        scale=1.0,
        feed_forward=lambda i: plain_mlp(i, dims, act, True),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        rename=renamed(NAMES, {"model.layers.": "transformer.h."}),
        encoder=EncoderSpec(POSITIONS, dims.max_position, writes=True),
    )


def _kinds(config: Fields, layers: int) -> list[str]:
    """Of each layer: ``attention_types`` has lists of kinds, each with how often it comes."""
    stated = config.filled({"attention_types": [[list(KINDS), 12]]}).values["attention_types"]
    found: list[str] = []
    for part in stated if isinstance(stated, list) else [stated]:
        kinds, count = part if isinstance(part, list) and len(part) == 2 else (None, 0)
        good = isinstance(kinds, list) and all(kind in KINDS for kind in kinds) and type(count) is int
        if not good or not 0 < count <= layers:
            config.fail("attention_types", stated, f"lists of {' and '.join(KINDS)}, each with a count")
        found += list(kinds or ()) * count
    if len(found) != layers:
        config.fail("attention_types", stated, f"{layers} layers in all, as num_layers says")
    return found


SIZES = dict(hidden_size=64, num_layers=2, num_heads=4, max_position_embeddings=512, window_size=8)
FAMILY = Family(
    "gpt_neo",
    "GPT-Neo 125M to 2.7B, TinyStories",
    ("GPTNeoForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, attention_types=[[["global", "local"], 1]])),
        Tiny(dict(SIZES, attention_types=[[["local"], 2]], intermediate_size=96, activation_function="relu")),
    ),
    gpt2.NO_GGUF,
    spellings=gpt2.SPELLINGS,
)
