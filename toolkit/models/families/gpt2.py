"""GPT-2: learned positions, layer norms, a plain MLP; matrices stand as [in, out] on disk. Source: transformers
``GPT2LMHeadModel``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from toolkit.models.config.dims import Dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.encoder import POSITIONS
from toolkit.models.families.gptj import SIZES, read_gpt_dims
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import AttentionSpec, EncoderSpec
from toolkit.models.stored import Fused, fused_qkv, renamed

NAMES = {
    "model.embed_tokens": "transformer.wte",
    POSITIONS: "transformer.wpe.weight",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
# As the hub's first files have them, which know nothing of a class with a head.
SPELLINGS = tuple((f"transformer.{part}", part) for part in ("h.", "wte", "wpe", "ln_f"))
NO_GGUF = "positions that are learned are not read from GGUF files yet, nor written to them"


def build(config: Fields) -> Built:
    config.only(": it is for models that read another's states", add_cross_attention=False)
    dims = read_gpt_dims(config, tied=True)
    h, inner = dims.hidden, dims.intermediate
    linears = {"self_attn.o_proj": ("attn.c_proj", h, h), "mlp.up_proj": ("mlp.c_fc", h, inner)}
    linears |= {"mlp.down_proj": ("mlp.c_proj", inner, h)}
    turned = [replace(fused_qkv(dims, "attn.c_attn"), shape=(h, 3 * h), transposed=True)]
    for part, (name, ins, outs) in linears.items():
        turned.append(Fused(name, {part: ((0, outs),)}, (ins, outs), transposed=True))
    return like_gpt2(config, dims, turned)


def like_gpt2(config: Fields, dims: Dims, fused: Sequence[Fused]) -> Built:
    """GPT-2, or StarCoder, whose matrices stand as others' do."""
    act = config.activation("activation_function", default="gelu_new")
    usual = dims.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)

    def change(layer: int, own: AttentionSpec) -> AttentionSpec:
        return replace(own, scale=usual / (layer + 1) if by_layer else usual)

    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        attention_bias=True,
        activation=act,
        change=change,
        feed_forward=lambda i: plain_mlp(i, dims, act, True),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        rename=renamed(NAMES, {"model.layers.": "transformer.h."}),
        fused=fused,
        encoder=EncoderSpec(POSITIONS, dims.max_position, writes=True),
    )


FAMILY = Family(
    "gpt2",
    "GPT-2, DistilGPT2, Cerebras-GPT, DialoGPT",
    ("GPT2LMHeadModel",),
    build,
    (
        Tiny(SIZES),
        Tiny(dict(SIZES, n_inner=96, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)),
    ),
    NO_GGUF,
    spellings=SPELLINGS,
)
