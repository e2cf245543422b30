"""LFM2: short convolutions, and attention in a few layers. Source: transformers ``Lfm2ForCausalLM``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, Gguf, Metadata
from toolkit.models.gguf_states import CONV, CONV_ENTRY, read_attention, short_conv_keys
from toolkit.models.spec import AttentionSpec, ConvSpec, LinearSpec, Mixer, ShortConvSpec
from toolkit.models.stored import Fused, joined, renamed

NAMES = {
    "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
    ".mlp.": ".feed_forward.",
    ".gate_proj": ".w1",
    ".up_proj": ".w3",
    ".down_proj": ".w2",
    "_norm": "_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm": "model.embedding_norm",
}


def build(config: Fields) -> Built:
    dims = read_lfm2_dims(config)
    return lfm2(config, replace(dims, intermediate=_width(config, dims.intermediate)))


def read_lfm2_dims(config: Fields) -> Dims:
    values = {**config.values}
    values.setdefault("tie_word_embeddings", values.get("tie_embedding"))
    values.setdefault("intermediate_size", values.get("block_ff_dim"))
    return read_dims(Fields(values, config.source), eps=1e-5, tied=True, kv_heads=8)


def lfm2(config: Fields, dims: Dims, **options: Any) -> Built:
    """The family and what grows out of it; ``options``: of ``llama_like``."""
    types = config.choices("layer_types", dims.layers, ("full_attention", "conv"))
    if types is None:
        attends = config.indices("full_attn_idxs", dims.layers) or range(dims.layers)
        types = ["full_attention" if i in attends else "conv" for i in range(dims.layers)]
    return llama_like(
        config,
        dims,
        theta=1e6,
        qk_norm=True,
        activation="silu",
        change=mixers(config, dims, types, kernel=3),
        rename=renamed({}, NAMES),
        fused=[entry(dims)],
        **options,
    )


def entry(dims: Dims) -> Fused:
    """What a convolution reads, in one matrix."""
    return joined("conv.in_proj", {f"conv.{part}_proj": dims.hidden for part in "bcx"})


def _width(config: Fields, width: int) -> int:
    """Of the feed-forward part: the number stated is made smaller and then rounded up."""
    if config.flag("block_auto_adjust_ff_dim", True):
        step = config.integer("block_multiple_of", default=256)
        width = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
        width = -(-width // step) * step
    return width


def mixers(config: Fields, dims: Dims, types: Sequence[str], kernel: int) -> Callable[[int, AttentionSpec], Mixer]:
    """What stands in the place of each layer's attention, by ``layer_types``; ``kernel``: what its absence means."""
    kernel = config.integer("conv_L_cache", default=kernel, low=2, high=64)
    bias = config.flag("conv_bias", False)

    def mixer(layer: int, attention: AttentionSpec) -> Mixer:
        if types[layer] != "conv":
            return attention
        prefix, n = f"model.layers.{layer}.conv", dims.hidden
        return ShortConvSpec(
            b=LinearSpec(f"{prefix}.b_proj", n, n, bias, "column"),
            c=LinearSpec(f"{prefix}.c_proj", n, n, bias, "column"),
            value=LinearSpec(f"{prefix}.x_proj", n, n, bias, "column"),
            conv=ConvSpec(f"{prefix}.conv.weight", f"{prefix}.conv.bias" if bias else None, n, kernel),
            out=LinearSpec(f"{prefix}.out_proj", n, n, bias, "row"),
        )

    return mixer


def read_gguf(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ["full_attention" if attends else "conv" for attends in read_attention(file, config)]
    return {"layer_types": kinds, "conv_L_cache": file.whole("shortconv.l_cache")}


GGUF = Gguf(
    "lfm2",
    "lfm2",
    {**BLOCK, **QK_NORMS, **CONV},
    joined=CONV_ENTRY,
    biases=False,
    fields={"hidden_act": "silu", "block_auto_adjust_ff_dim": False, "conv_bias": False},
    top={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "token_embd_norm": "model.norm",
        "output": "lm_head",
    },
    read=read_gguf,
    write=lambda spec: short_conv_keys(spec, "lfm2"),
)
SIZES = dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_multiple_of=32)
FAMILY = Family(
    "lfm2",
    "LFM2 350M to 2.6B",
    ("Lfm2ForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(
            dict(
                SIZES, conv_bias=True, conv_L_cache=4, num_key_value_heads=1, tie_word_embeddings=False,
                block_auto_adjust_ff_dim=False,
            )
        ),
    ),
    GGUF,
)  # fmt: skip
