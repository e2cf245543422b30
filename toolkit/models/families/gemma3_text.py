"""Gemma 3 (text): Gemma 2 without soft caps, with norms on q and k, and a rope of its own for the layers that slide.
Source: arXiv 2503.19786 and transformers ``Gemma3ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import layer_ropes, read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import SANDWICH_NORMS, Built, llama_like
from toolkit.models.families.gemma2 import FIELDS, softcap
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, Gguf, Metadata
from toolkit.models.gguf import SANDWICH_NORMS as GGUF_NORMS
from toolkit.models.spec import DecoderSpec

PATTERN, LOCAL_THETA = 6, 10_000.0  # every sixth layer sees everything


def build(config: Fields) -> Built:
    dims = read_dims(config, tied=True, head_dim=256, kv_heads=4)
    if config.has("attn_logit_softcapping"):
        config.fail(
            "attn_logit_softcapping", config.values["attn_logit_softcapping"], "null, as in all released models"
        )
    every = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=PATTERN, high=MAX_LAYERS)
    slides = [(i + 1) % every != 0 for i in range(dims.layers)]
    window = read_window(config, default=4096)
    if config.flag("use_bidirectional_attention", False) and window is not None:
        window //= 2  # it counts both sides (EmbeddingGemma); the registry has all tokens see each other then
    windows = read_windows(config, dims.layers, window, slides)
    local_theta = config.number("rope_local_base_freq", default=LOCAL_THETA, low=1.0)
    ropes = layer_ropes(config, dims, windows, theta=1e6, local_theta=local_theta)
    return llama_like(
        config,
        dims,
        # max_position_embeddings counts what linear scaling brings
        rope=[replace(rope, max_position=dims.max_position) if rope.kind == "linear" else rope for rope in ropes],
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        activation=config.activation("hidden_activation", default="gelu_pytorch_tanh"),
        norms=SANDWICH_NORMS,
        norm_offset=1.0,
        embed_scale=dims.hidden**0.5,
        logit_softcap=softcap(config, "final_logit_softcapping", None),
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    full = {"rope_theta": file.number("rope.freq_base", 1e6), "rope_type": "default"}
    if file.has("rope.scaling.factor"):
        full |= {"rope_type": "linear", "factor": file.number("rope.scaling.factor")}
    local = {"rope_theta": file.number("rope.freq_base_swa", LOCAL_THETA), "rope_type": "default"}
    width, large = (
        config["hidden_size"],
        config["num_hidden_layers"] == 62,
    )  # the 27B model is the one that departs from head_dim
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "sliding_window": file.whole("attention.sliding_window", 4096),
        "sliding_window_pattern": PATTERN,
        "query_pre_attn_scalar": width // config["num_attention_heads"] if large else config["head_dim"],
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    layers = spec.attention_layers()
    if any((a.window is None) != ((i + 1) % PATTERN == 0) for i, a in layers):
        raise ToolkitError(f"gguf: llama.cpp's gemma3 sees everything in each {PATTERN}th layer alone, this model not")
    local = next(a.rope for _, a in layers if a.window is not None)
    assert local is not None
    full = next((a.rope for _, a in layers if a.window is None), local)
    if full is not None and full.kind not in ("default", "linear"):
        raise ToolkitError(f"gguf: files of gemma3 are read with linear scaling alone; this model's is {full.kind}")
    if spec.logit_softcap is not None:
        raise ToolkitError("gguf: llama.cpp's gemma3 does not cap logits, this model does")
    return {"rope.freq_base_swa": float(local.theta), "context_length": spec.max_position}  # scaled, see build


def _scale(spec: DecoderSpec) -> float:
    first = spec.attention_layers()[0][1]
    return ((spec.hidden_size // first.heads) if len(spec.layers) == 62 else first.head_dim) ** -0.5


SLIDING = {"rope_type": "default", "rope_theta": 10000.0}
FAMILY = Family(
    "gemma3_text",
    "Gemma 3 1B; the text part of larger ones; EmbeddingGemma",
    ("Gemma3ForCausalLM",),
    build,
    (
        Tiny(
            dict(
                head_dim=32, sliding_window=16, query_pre_attn_scalar=32, num_hidden_layers=6,
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": SLIDING,
                },
            )
        ),
        Tiny(
            dict(
                head_dim=24, sliding_window=12, query_pre_attn_scalar=20, num_key_value_heads=1,
                layer_types=["full_attention", "sliding_attention"],
                final_logit_softcapping=10.0,
            )
        ),
    ),
    Gguf("gemma3", "gemma3_text", {**BLOCK, **QK_NORMS, **GGUF_NORMS}, biases=False, window=True,
         local="own", fields=FIELDS, read=_read, write=_write, scale=_scale),
)  # fmt: skip
