"""Gemma 2: norms around each sublayer with weights stored as w - 1, soft-capped scores and logits, scaled embeddings,
every other layer sliding. Source: arXiv 2408.00118 and transformers ``Gemma2ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config_fields import Fields
from toolkit.models.decoder import (
    Built,
    assemble,
    attention,
    gated_mlp,
    norm,
    read_dims,
    read_window,
    read_windows,
    stored_tensors,
)
from toolkit.models.rope_config import read_rope
from toolkit.models.spec import LayerSpec, Sublayer


def build(config: Fields) -> Built:
    dims = read_dims(config, tied=True, head_dim=256)
    if config.flag("use_bidirectional_attention", False):
        config.fail("use_bidirectional_attention", True, "false (a decoder is causal)")
    windows = read_windows(
        config, dims.layers, read_window(config, default=4096), [i % 2 == 0 for i in range(dims.layers)]
    )
    softcap = _softcap(config, "attn_logit_softcapping", 50.0)
    scale = config.number("query_pre_attn_scalar", default=256.0) ** -0.5
    bias = config.flag("attention_bias", False)
    act = config.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")

    layers = []
    for i in range(dims.layers):
        prefix = f"model.layers.{i}"
        kind = "full_attention" if windows[i] is None else "sliding_attention"
        rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position, layer_type=kind)
        mixer = attention(i, dims, rope, window=windows[i], qkv_bias=bias, o_bias=bias, scale=scale, softcap=softcap)
        mlp = gated_mlp(f"{prefix}.mlp", dims.hidden, dims.intermediate, act)
        before, after, before_mlp, after_mlp = (
            norm(f"{prefix}.{name}", dims.hidden, dims.eps, offset=1.0)
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        )
        layers.append(LayerSpec((Sublayer(mixer, before, after), Sublayer(mlp, before_mlp, after_mlp))))
    spec = assemble(
        "gemma2",
        dims,
        layers,
        norm_offset=1.0,
        embed_scale=dims.hidden**0.5,
        logit_softcap=_softcap(config, "final_logit_softcapping", 30.0),
    )
    return spec, stored_tensors(spec)


def _softcap(config: Fields, name: str, default: float) -> float | None:
    """An explicit null turns the cap off."""
    if name in config.values and config.values[name] is None:
        return None
    return config.number(name, default=default)
