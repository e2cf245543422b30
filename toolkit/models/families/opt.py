"""OPT and Galactica: GPT-2's shape with ReLU, positions that are counted from 2. Source: transformers
``OPTForCausalLM``, arXiv 2205.01068."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.encoder import POSITIONS
from toolkit.models.families.gpt2 import NO_GGUF
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec
from toolkit.models.stored import renamed

OFFSET = 2
NAMES = {
    POSITIONS: "model.decoder.embed_positions.weight",
    "model.norm": "model.decoder.final_layer_norm",
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "model.embed_tokens": "model.decoder.embed_tokens",
}


def build(config: Fields) -> Built:
    usual = {
        "intermediate_size": config.integer("ffn_dim", default=3072),
        "num_key_value_heads": None,
        "head_dim": None,
        "layer_norm_eps": 1e-5,
    }
    dims = read_dims(config.changed(usual).filled({"max_position_embeddings": 2048}), tied=True)
    config.only(": norms behind each sum, as OPT 350M has them, are not computed", do_layer_norm_before=True)
    config.only(_remove_final_layer_norm=False)
    if (narrow := config.integer("word_embed_proj_dim", default=dims.hidden)) != dims.hidden:
        config.fail("word_embed_proj_dim", narrow, f"hidden_size ({dims.hidden}): no projection is computed")
    act, bias = config.activation("activation_function", default="relu"), config.flag("enable_bias", True)
    affine = config.flag("layer_norm_elementwise_affine", True)
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        attention_bias=bias,
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, bias),
        norm=partial(layer_norm, eps=dims.eps, bias=affine, weight=affine),
        rename=renamed(NAMES, {"model.layers.": "model.decoder.layers."}),
        encoder=EncoderSpec(POSITIONS, dims.max_position + OFFSET, OFFSET, writes=True),
    )


SIZES = dict(ffn_dim=128, max_position_embeddings=512, word_embed_proj_dim=64)
FAMILY = Family(
    "opt",
    "OPT 125M, 1.3B to 66B; Galactica",
    ("OPTForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(dict(SIZES, enable_bias=False, activation_function="gelu", tie_word_embeddings=False)),
    ),
    NO_GGUF,
    spellings=(("model.decoder.", "decoder."),),
)
