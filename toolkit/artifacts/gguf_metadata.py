"""A decoder spec as llama.cpp's metadata: architecture, dimensions, rope. The inverse of ``gguf_models.hf_config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.models.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec, RopeSpec

# Our family → general.architecture. internlm2 and mistral are llamas once their tensors have a llama's names.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "internlm2": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "phi3": "phi3",
}
# Architectures without a bias on o_proj, which Hugging Face's models have as soon as q, k and v have one.
WITHOUT_BIAS = ("qwen3", "qwen3moe", "gemma2")


@dataclass(frozen=True)
class ModelMetadata:
    """``values``: metadata without ``general.*`` and tokenizer. ``factors``: rope tensors, float32, by name.
    ``notes``: what the file cannot say, one line each.
    """

    arch: str
    values: dict[str, Any]
    factors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def model_metadata(spec: DecoderSpec, context_length: int) -> ModelMetadata:
    """Metadata of a model. ``context_length``: what config.json states.

    Raises ToolkitError for what llama.cpp's architecture of that name does not compute.
    """
    arch = ARCHITECTURES.get(spec.family)
    if arch is None:
        raise ToolkitError(f"gguf: no llama.cpp architecture for the {spec.family} family is known to this tool")
    layers = [attention for _, attention in spec.attention_layers()]
    first = layers[0]
    values: dict[str, Any] = {
        "block_count": len(layers),
        "context_length": context_length,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": _feed_forward(spec),
        "attention.head_count": first.heads,
        "attention.head_count_kv": first.kv_heads,
        "attention.key_length": first.head_dim,
        "attention.value_length": first.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.final_norm.eps),
        "vocab_size": spec.vocab_size,
    }
    found = ModelMetadata(arch, values)
    values.update(_experts(spec, arch))
    if first.rope is not None:
        _rope(first.rope, found)
    _windows(spec, layers, found)
    _peculiarities(spec, first)
    _biases(spec, arch)
    if spec.family == "gemma2":
        values["attn_logit_softcapping"] = float(first.softcap or 0.0)
        values["final_logit_softcapping"] = float(spec.logit_softcap or 0.0)
    return ModelMetadata(arch, {f"{arch}.{key}": value for key, value in values.items()}, found.factors, found.notes)


def _feed_forward(spec: DecoderSpec) -> int:
    dense = [s.mixer for layer in spec.layers for s in layer.sublayers if isinstance(s.mixer, MlpSpec)]
    if dense:
        return dense[0].up.out_features
    return next(
        s.mixer.experts[0].up.out_features
        for layer in spec.layers
        for s in layer.sublayers
        if isinstance(s.mixer, MoeSpec)
    )


def _experts(spec: DecoderSpec, arch: str) -> dict[str, Any]:
    layers = [s.mixer for layer in spec.layers for s in layer.sublayers if isinstance(s.mixer, MoeSpec)]
    if not layers:
        return {}
    if len(layers) != len(spec.layers):
        raise ToolkitError(f"gguf: llama.cpp's {arch} has experts in every layer, this model in {len(layers)} of them")
    if not layers[0].norm_topk or layers[0].shared is not None:
        raise ToolkitError(f"gguf: llama.cpp's {arch} rescales the experts' weights to sum 1; this model does not")
    found: dict[str, Any] = {"expert_count": len(layers[0].experts), "expert_used_count": layers[0].top_k}
    if arch == "qwen3moe":
        found["expert_feed_forward_length"] = layers[0].experts[0].up.out_features
    return found


def _rope(rope: RopeSpec, found: ModelMetadata) -> None:
    values = found.values
    values["rope.dimension_count"] = rope.rotary_dim
    values["rope.freq_base"] = float(rope.theta)
    if rope.kind in ("linear", "yarn"):
        values["rope.scaling.type"] = rope.kind
        values["rope.scaling.factor"] = float(rope.factor)
    if rope.kind == "yarn":
        values["rope.scaling.original_context_length"] = rope.original_max_position
    elif rope.kind == "llama3":
        found.factors["rope_freqs.weight"] = _llama3_factors(rope)
    elif rope.kind == "longrope":
        values["rope.scaling.original_context_length"] = rope.original_max_position
        values["rope.scaling.attn_factor"] = float(1.0 if rope.attention_factor is None else rope.attention_factor)
        found.factors["rope_factors_long.weight"] = np.asarray(rope.long_factor, np.float32)
        found.factors["rope_factors_short.weight"] = np.asarray(rope.short_factor, np.float32)
    elif rope.kind == "dynamic":
        values["context_length"] = min(values["context_length"], rope.original_max_position)
        found.notes.append(
            f"dynamic rope scaling has no place in GGUF: right up to {rope.original_max_position} tokens of context"
        )


def _llama3_factors(rope: RopeSpec) -> NDArray[np.float32]:
    """What every frequency is divided by: 1 for short wavelengths, ``factor`` for long ones, a blend between."""
    exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    rotations = rope.original_max_position / (2 * np.pi * rope.theta**exponents)
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / rope.factor + smooth)).astype(np.float32)


def _windows(spec: DecoderSpec, layers: list[AttentionSpec], found: ModelMetadata) -> None:
    windows = {attention.window for attention in layers} - {None}
    if not windows:
        if spec.family == "phi3":  # the architecture wants the key
            found.values["attention.sliding_window"] = found.values["context_length"]
        return
    window = windows.pop()
    if spec.family in ("gemma2", "phi3"):
        found.values["attention.sliding_window"] = window
    else:
        found.notes.append(f"llama.cpp's {found.arch} has no sliding window: right up to {window} tokens of context")


def _peculiarities(spec: DecoderSpec, first: AttentionSpec) -> None:
    scale = first.head_dim**-0.5
    if spec.family == "gemma2" and len(spec.layers) == 46:
        scale = (spec.hidden_size // first.heads) ** -0.5
    if abs(first.scale / scale - 1) > 1e-6:
        raise ToolkitError(
            f"gguf: llama.cpp scales queries of this architecture by {scale:.6g}, the model by {first.scale:.6g}"
        )


def _biases(spec: DecoderSpec, arch: str) -> None:
    odd = next((linear.name for linear in spec.linears() if linear.bias), None)
    if odd is not None and arch in WITHOUT_BIAS:
        raise ToolkitError(f"gguf: llama.cpp's {arch} has no biases, this model has {odd}.bias")
