"""Ministral 3: Llama with YaRN whose queries grow with their position, in steps of the length it was first trained for.
Source: transformers ``Ministral3ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims, read_window
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, Metadata, read_betas
from toolkit.models.spec import DecoderSpec, QueryScale

ROPE = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)


def build(config: Fields) -> Built:
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.changed({"rope_parameters": ROPE})
    dims = read_dims(config, eps=1e-5, head_dim=128, kv_heads=8)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    beta = _beta(config)
    length = rope.original_max_position or dims.max_position
    grows = QueryScale("floor", length, beta) if beta else None
    return llama_like(
        config,
        dims,
        rope=rope,
        windows=read_window(config),
        change=lambda i, a: replace(a, q_scale=grows),
    )


def _beta(config: Fields) -> float:
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters")
    assert scaling is not None
    if scaling.values.get("llama_4_scaling_beta") == 0:
        return 0.0
    found: float = scaling.number("llama_4_scaling_beta", default=0.0, high=100.0)
    return found


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    yarn = {
        **ROPE,
        **read_betas(file),
        "rope_theta": config["rope_theta"],
        "factor": file.number("rope.scaling.factor"),
        "original_max_position_embeddings": file.whole("rope.scaling.original_context_length"),
        "llama_4_scaling_beta": file.number("attention.temperature_scale", 0.0),
    }
    return {"rope_parameters": yarn}


def _write(spec: DecoderSpec) -> dict[str, Any]:
    first = spec.attention_layers()[0][1]
    if first.rope is None or first.rope.kind != "yarn" or first.rope.attention_factor != 1.0:
        raise ToolkitError(
            "gguf: llama.cpp's mistral3 turns by YaRN with equal mscale and mscale_all_dim, this model not"
        )
    grows = first.q_scale
    return {
        "rope.scaling.yarn_log_multiplier": 1.0,
        **({} if grows is None else {"attention.temperature_scale": grows.factor}),
    }


YARN = dict(ROPE, rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.7)
FAMILY = Family(
    "ministral3",
    "Ministral 3 3B, 8B, 14B (text)",
    ("Ministral3ForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32, rope_parameters=YARN)),
        Tiny(dict(head_dim=24, num_key_value_heads=1, rope_parameters=YARN, tie_word_embeddings=True)),
    ),
    Gguf(
        "mistral3",
        "ministral3",
        BLOCK,
        interleaved_qk=True,
        biases=False,
        fields={"hidden_act": "silu"},
        read=_read,
        write=_write,
    ),
)
