"""Falcon-H1: attention and Mamba-2 beside one another in every layer, and multipliers everywhere. Source: transformers
``FalconH1ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from toolkit.models.config.dims import check_convolved, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.mamba import fused_entry, mamba_layers, read_mamba
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, assemble, attention, gated_mlp, rms_norm
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, Metadata, read_biases
from toolkit.models.gguf_states import MAMBA, MAMBA_ENTRY, MAMBA_FIELDS, mamba_keys, mamba_layouts, read_mamba_keys
from toolkit.models.spec import DecoderSpec, LayerSpec, Sublayer
from toolkit.models.stored import renamed, stored_tensors

NAMES = {
    "post_attention_layernorm": "pre_ff_layernorm",
    "mlp.gate_proj": "feed_forward.gate_proj",
    "mlp.up_proj": "feed_forward.up_proj",
    "mlp.down_proj": "feed_forward.down_proj",
    "model.norm": "model.final_layernorm",
}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=8)
    inner = None if "mamba_d_ssm" in config.values else 1024
    sizes = read_mamba(config, dims.hidden, inner=config.integer("mamba_d_ssm", default=inner))
    sizes = replace(sizes, out_bias=config.flag("projectors_bias", False))
    normed, before = config.flag("mamba_rms_norm", False), config.flag("mamba_norm_before_gate", True)
    eps = dims.eps if normed else None
    mamba = mamba_layers(sizes, dims.hidden, eps, norm_first=before, scales=_scales(config, sizes.bias))
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    bias, entry = config.flag("attention_bias", False), config.number("attention_in_multiplier", default=1.0)
    if bias and entry != 1:
        config.fail("attention_in_multiplier", entry, "1 with attention_bias, as biases are not multiplied")
    scale = dims.head_dim**-0.5 * entry**2 * config.number("key_multiplier", default=1.0)
    attends = partial(attention, dims=dims, rope=rope, qkv_bias=bias, o_bias=bias, scale=scale)
    after = entry * config.number("attention_out_multiplier", default=1.0)
    kept = config.number("ssm_out_multiplier", default=1.0)
    gate, down = config.numbers("mlp_multipliers", 2) if config.has("mlp_multipliers") else (1.0, 1.0)
    check_convolved(config, "hidden_act")
    act, mlp_bias = config.activation("hidden_act"), config.flag("mlp_bias", False)
    norm = partial(rms_norm, eps=dims.eps)
    layers = []
    for i in range(dims.layers):
        prefix = f"model.layers.{i}"
        first = norm(f"{prefix}.input_layernorm", dims.hidden)
        mlp = gated_mlp(f"{prefix}.mlp", dims.hidden, dims.intermediate, act, mlp_bias)
        sublayers = (
            Sublayer(mamba(f"{prefix}.mamba"), first, residual_scale=kept),
            Sublayer(attends(i), first, residual_scale=after, reads="block"),
            Sublayer(
                replace(mlp, gate_scale=gate),
                norm(f"{prefix}.post_attention_layernorm", dims.hidden),
                residual_scale=down,
            ),
        )
        layers.append(LayerSpec(sublayers))
    spec = assemble(
        dims,
        layers,
        norm("model.norm", dims.hidden),
        embed_scale=config.number("embedding_multiplier", default=1.0),
        head_scale=config.number("lm_head_multiplier", default=1.0),
    )
    return spec, stored_tensors(spec, renamed(NAMES), [fused_entry(sizes, "mamba")])


def _scales(config: Fields, bias: bool) -> tuple[float, ...]:
    """Of what enters the state space, the input's and those of its parts together."""
    entry = config.number("ssm_in_multiplier", default=1.0)
    if bias and entry != 1:
        config.fail("ssm_in_multiplier", entry, "1 with mamba_proj_bias, as biases are not multiplied")
    parts = config.numbers("ssm_multipliers", 5) if config.has("ssm_multipliers") else (1.0,) * 5
    return tuple(entry * part for part in parts)


def _folded(spec: DecoderSpec) -> dict[str, Any]:
    """The multipliers, which llama.cpp's converter takes into the weights."""
    found: dict[str, Any] = {spec.embed: spec.embed_scale, spec.head: spec.head_scale}
    for layer in spec.layers:
        state, attends, feed = layer.sublayers
        mamba, attention, mlp = state.mixer, attends.mixer, feed.mixer
        assert mamba.kind == "mamba" and attention.kind == "attention" and mlp.kind == "mlp" and mlp.gate is not None
        z, u, b, c, dt = mamba.scales
        shared = mamba.groups * mamba.state_size
        found |= {
            mamba.z.name: z,
            mamba.inner.name: np.repeat([u, b, c], [mamba.width_out, shared, shared]),
            mamba.dt.name: dt,
            mamba.out.name: state.residual_scale,
            attention.k.name: attention.scale * attention.head_dim**0.5,
            attention.o.name: attends.residual_scale,
            mlp.gate.name: mlp.gate_scale,
            mlp.down.name: feed.residual_scale,
        }
    return found


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **read_mamba_keys(file, MAMBA_FIELDS),
        "mamba_d_ssm": file.whole("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
        **read_biases(file, config),
    }


GGUF = Gguf(
    "falcon-h1",
    "falcon_h1",
    {**BLOCK, **MAMBA},
    joined=MAMBA_ENTRY,
    bare=("ffn_norm",),
    layouts=mamba_layouts,
    folded=_folded,
    fields={"hidden_act": "silu"},
    read=_read,
    write=lambda spec: mamba_keys(spec, "falcon-h1"),
    scale=None,
)
SIZES = dict(
    mamba_d_ssm=128, mamba_n_heads=32, mamba_d_head=4, mamba_d_state=16, mamba_chunk_size=16, key_multiplier=0.7,
    attention_in_multiplier=1.2, attention_out_multiplier=0.8, ssm_in_multiplier=1.3, ssm_out_multiplier=0.9,
    ssm_multipliers=[0.9, 0.8, 1.1, 1.2, 0.7], mlp_multipliers=[0.8, 1.1], embedding_multiplier=2.0,
    lm_head_multiplier=0.5,
)  # fmt: skip
FAMILY = Family(
    "falcon_h1",
    "Falcon-H1 0.5B to 34B",
    ("FalconH1ForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(
            dict(
                SIZES, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2, projectors_bias=True,
                num_key_value_heads=1, tie_word_embeddings=True,
            )
        ),
    ),
    GGUF,
)  # fmt: skip
