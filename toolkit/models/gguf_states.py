"""How GGUF has layers that keep a state of fixed size: short convolutions, Mamba-2 and the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.models.gguf import Layout, Metadata
from toolkit.models.spec import DecoderSpec, LayerSpec

CONV = {"shortconv.conv.weight": "conv.conv.weight", "shortconv.out_proj": "conv.out_proj"}
CONV_ENTRY = {"shortconv.in_proj": ("conv.b_proj", "conv.c_proj", "conv.x_proj")}
MAMBA = {
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA_ENTRY = {"ssm_in": ("mamba.z_proj", "mamba.x_proj", "mamba.dt_proj")}
DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
GATED_QUERIES = {"attn_q": ("self_attn.q_proj", "self_attn.g_proj")}
RATES = {"ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")}


def mamba_layouts(layer: LayerSpec) -> dict[str, Layout]:
    """Of Mamba-2: a number a head in a column, the norm's in groups."""
    one = _mixer(layer, "mamba")
    if one is None:
        return {}
    column, groups = (one.heads, 1), (one.groups, one.width_out // one.groups)
    return {
        "ssm_a": Layout(shape=column, decay=True),
        "ssm_d": Layout(shape=column),
        "ssm_norm": Layout(shape=groups),
    }


def delta_layouts(layer: LayerSpec) -> dict[str, Layout]:
    """Of Qwen3-Next: each head's queries before its gate, and β before fade of the heads that share keys."""
    attention, delta = _mixer(layer, "attention"), _mixer(layer, "delta")
    if attention is not None:
        return {"attn_q": Layout(rows=_woven(attention.heads, attention.head_dim))}
    if delta is None:
        return {}
    return {
        "ssm_a": Layout(decay=True),
        "ssm_ba": Layout(rows=_woven(delta.k_heads, delta.heads // delta.k_heads)),
    }


def delta_in_turn(layer: LayerSpec) -> dict[str, Layout]:
    """Of Qwen3.5: the same queries; of the heads first one of each that share keys, then the next of each."""
    delta = _mixer(layer, "delta")
    if delta is None:
        return delta_layouts(layer)
    share = delta.heads // delta.k_heads
    heads = [k * share + i for i in range(share) for k in range(delta.k_heads)]
    values = [h * delta.v_dim + d for h in heads for d in range(delta.v_dim)]
    keys = 2 * delta.k_heads * delta.k_dim
    after_keys = (*range(keys), *(keys + i for i in values))
    rates = Layout(rows=tuple(heads))
    return {
        "attn_qkv": Layout(rows=after_keys),
        "attn_gate": Layout(rows=tuple(values)),
        "ssm_conv1d.weight": Layout(rows=after_keys),
        "ssm_dt.bias": rates,
        "ssm_a": Layout(rows=tuple(heads), decay=True),
        "ssm_beta": rates,
        "ssm_alpha": rates,
        "ssm_out": Layout(columns=tuple(values)),
    }


def _woven(count: int, size: int) -> tuple[int, ...]:
    """Of two matrices one below the other: ``size`` rows of the first, as many of the second, and so on."""
    half = count * size
    return tuple(at + h * size + i for h in range(count) for at in (0, half) for i in range(size))


def _mixer(layer: LayerSpec, kind: str) -> Any:
    return next((s.mixer for s in layer.sublayers if s.mixer.kind == kind), None)


def of_attention(spec: DecoderSpec) -> list[bool]:
    """Which layers have attention."""
    return [_mixer(layer, "attention") is not None for layer in spec.layers]


def kv_heads(spec: DecoderSpec, arch: str) -> dict[str, Any]:
    """Heads of keys a layer, 0 of those without attention, by which llama.cpp tells the layers apart. Raises
    ToolkitError for a model without attention."""
    if True not in of_attention(spec):
        raise ToolkitError(f"gguf: llama.cpp's {arch} has attention in some layers, this model in none")
    found = [0 if (a := _mixer(layer, "attention")) is None else a.kv_heads for layer in spec.layers]
    return {"attention.head_count_kv": per_layer(found)}


def per_layer(numbers: Iterable[int]) -> Any:
    return np.array(list(numbers), np.int32)


def read_attention(file: Metadata, config: Mapping[str, Any]) -> list[bool]:
    """Which layers have attention."""
    return [count > 0 for count in file.each("attention.head_count_kv", config["num_hidden_layers"])]


def mamba_keys(spec: DecoderSpec, arch: str) -> dict[str, int]:
    """The sizes of Mamba-2. Raises ToolkitError for what llama.cpp does not compute."""
    one = next((m for _, m in spec.mixers() if m.kind == "mamba"), None)
    if one is None:
        raise ToolkitError(f"gguf: llama.cpp's {arch} has state spaces, this model has none")
    if one.conv.bias is None or any(x.bias for x in one.linears()):
        raise ToolkitError(f"gguf: llama.cpp's {arch} has a bias of convolutions, and none of Mamba's matrices")
    if one.norm is not None and one.norm_first:
        raise ToolkitError(f"gguf: llama.cpp's {arch} norms what is gated, this model before that")
    return {
        "ssm.conv_kernel": one.conv.kernel,
        "ssm.inner_size": one.width_out,
        "ssm.state_size": one.state_size,
        "ssm.time_step_rank": one.heads,
        "ssm.group_count": one.groups,
    }


MAMBA_FIELDS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "kernel": "mamba_d_conv",
}


def read_mamba_keys(file: Metadata, names: Mapping[str, str]) -> dict[str, int]:
    """Fields of a config. ``names``: what it calls "heads", "head_dim", "groups", "state" and "kernel"."""
    heads = file.whole("ssm.time_step_rank")
    found = {
        "heads": heads,
        "head_dim": file.whole("ssm.inner_size") // heads,
        "groups": file.whole("ssm.group_count"),
        "state": file.whole("ssm.state_size"),
        "kernel": file.whole("ssm.conv_kernel"),
    }
    return {name: found[ours] for ours, name in names.items()}


def short_conv_keys(spec: DecoderSpec, arch: str) -> dict[str, Any]:
    """The layers, and the tokens that a convolution sees. Raises ToolkitError for a model without either kind."""
    one = next((m for _, m in spec.mixers() if m.kind == "short_conv"), None)
    if one is None:
        raise ToolkitError(f"gguf: llama.cpp's {arch} has short convolutions, this model has none")
    return {**kv_heads(spec, arch), "shortconv.l_cache": one.conv.kernel}


def delta_keys(spec: DecoderSpec, arch: str) -> dict[str, int]:
    """The sizes of the delta rule. Raises ToolkitError for what llama.cpp does not compute."""
    one = next((m for _, m in spec.mixers() if m.kind == "delta"), None)
    attends = of_attention(spec)
    if one is None or True not in attends:
        raise ToolkitError(f"gguf: llama.cpp's {arch} has layers of attention and of linear attention")
    every = attends.index(True) + 1
    if attends != [(i + 1) % every == 0 for i in range(len(attends))]:
        raise ToolkitError(f"gguf: llama.cpp's {arch} has attention in every n-th layer, this model in others")
    if one.k_dim != one.v_dim:
        raise ToolkitError(f"gguf: llama.cpp's {arch} has keys as wide as values, here {one.k_dim} and {one.v_dim}")
    return {
        "ssm.conv_kernel": one.conv.kernel,
        "ssm.state_size": one.k_dim,
        "ssm.group_count": one.k_heads,
        "ssm.time_step_rank": one.heads,
        "ssm.inner_size": one.heads * one.v_dim,
        "full_attention_interval": every,
    }


def read_delta_keys(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the configs of Qwen's line of models."""
    heads, size = file.whole("ssm.time_step_rank"), file.whole("ssm.state_size")
    return {
        "linear_conv_kernel_dim": file.whole("ssm.conv_kernel"),
        "linear_num_key_heads": file.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": file.whole("ssm.inner_size") // heads,
        "full_attention_interval": file.whole("full_attention_interval", 4),
        "partial_rotary_factor": file.whole("rope.dimension_count") / config["head_dim"],
    }
