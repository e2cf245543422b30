"""Mamba-2 alone: a state space in every layer, no attention and no MLP. Source: arXiv 2405.21060 and transformers
``Mamba2ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.models.config.dims import check_convolved, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.mamba import MambaDims, check_unlimited, fused_entry, mamba_layers, read_state_groups
from toolkit.models.decoder import Built, assemble, rms_norm
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import Gguf, Metadata
from toolkit.models.gguf_states import MAMBA, MAMBA_ENTRY, mamba_keys, mamba_layouts, read_mamba_keys
from toolkit.models.spec import LayerSpec, Sublayer
from toolkit.models.stored import renamed, stored_tensors

LONGEST = 1 << 20  # tokens; a state is as large whatever the context, and no config states one
NAMES = {
    "model.norm": "backbone.norm_f",
    "model.embed_tokens": "backbone.embeddings",
    "model.layers": "backbone.layers",
    "input_layernorm": "norm",
    ".mamba.": ".mixer.",
}


def build(config: Fields) -> Built:
    hidden = config.integer("hidden_size", default=4096)
    heads = config.integer("num_heads", default=128, high=100_000)
    head_dim = config.integer("head_dim", default=64, high=65_536)
    if (expand := config.integer("expand", default=2)) * hidden != heads * head_dim:
        config.fail("num_heads", heads, f"heads of {head_dim} that are {expand * hidden} wide in all")
    bias = config.flag("use_bias", False)
    sizes = MambaDims(
        heads,
        head_dim,
        read_state_groups(config, heads, "n_groups", default=8),
        config.integer("state_size", default=128, high=65_536),
        config.integer("conv_kernel", default=4, low=2, high=64),
        bias,
        config.flag("use_conv_bias", True),
        bias,
    )
    check_convolved(config, "hidden_act")
    check_unlimited(config)
    no_attention = {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": sizes.inner}
    stated = {"max_position_embeddings": LONGEST, **config.values, **no_attention}
    dims = read_dims(Fields(stated, config.source, config.prefix), eps=1e-5)
    mamba = mamba_layers(sizes, dims.hidden, dims.eps)
    layers = []
    for i in range(dims.layers):
        prefix = f"model.layers.{i}"
        part = Sublayer(mamba(f"{prefix}.mamba"), rms_norm(f"{prefix}.input_layernorm", dims.hidden, dims.eps))
        layers.append(LayerSpec((part,)))
    spec = assemble(dims, layers, rms_norm("model.norm", dims.hidden, dims.eps))
    return spec, stored_tensors(spec, renamed({}, NAMES), [fused_entry(sizes, "mamba")])


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "heads": "num_heads",
        "head_dim": "head_dim",
        "groups": "n_groups",
        "state": "state_size",
        "kernel": "conv_kernel",
    }
    return {**read_mamba_keys(file, names), "expand": file.whole("ssm.inner_size") // config["hidden_size"]}


SIZES = dict(num_heads=32, head_dim=4, state_size=16, n_groups=1, chunk_size=16)
FAMILY = Family(
    "mamba2",
    "Mamba-2 130M to 2.7B (in the form of transformers), Mamba-Codestral 7B",
    ("Mamba2ForCausalLM",),
    build,
    (Tiny(SIZES), Tiny(dict(SIZES, n_groups=2, use_bias=True, conv_kernel=3, tie_word_embeddings=True))),
    Gguf(
        "mamba2",
        "mamba2",
        {**MAMBA, "attn_norm": "input_layernorm"},
        joined=MAMBA_ENTRY,
        layouts=mamba_layouts,
        fields={"hidden_act": "silu"},
        read=_read,
        write=lambda spec: mamba_keys(spec, "mamba2"),
    ),
)
