"""A decoder spec as llama.cpp's metadata: architecture, dimensions, rope. Inverse of ``architectures.hf_config``."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.gguf import Gguf
from toolkit.models.registry import get
from toolkit.models.spec import AttentionSpec, DecoderSpec, LatentSpec, RopeSpec


@dataclass(frozen=True)
class ModelMetadata:
    """``gguf``: the architecture. ``values``: metadata without ``general.*`` and tokenizer. ``factors``: rope tensors,
    float32, by name. ``notes``: what the file cannot say, one line each. ``folded``: as of ``Gguf``.
    """

    gguf: Gguf
    values: dict[str, Any]
    factors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folded: dict[str, Any] = field(default_factory=dict)


def model_metadata(spec: DecoderSpec) -> ModelMetadata:
    """Metadata of a model.

    Raises ToolkitError for what llama.cpp's architecture of that name does not compute.
    """
    gguf = spelling(spec)
    if isinstance(gguf, str):
        raise ToolkitError(f"gguf: {gguf}")
    layers = [attention for _, attention in spec.attention_layers()]
    latents = [mixer for _, mixer in spec.mixers() if mixer.kind == "latent"]
    values: dict[str, Any] = {
        "block_count": len(spec.layers),
        "context_length": spec.max_position,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": _feed_forward(spec),
        **(_sizes(layers[0]) if layers else _latent_sizes(latents[0]) if latents else {"attention.head_count": 0}),
        gguf.eps_key: float(spec.final_norm.eps),
        "vocab_size": spec.vocab_size,
    }
    found = ModelMetadata(gguf, values)
    values.update(_experts(spec, gguf))
    if (rope := latents[0].rope if latents else _main_rope(layers)) is not None:
        _rope(rope, found)
        _check_ropes(layers, gguf, rope)
    if latents:
        values.update(_latent_scale(latents[0], gguf))
    if not gguf.alibi and any(attention.alibi is not None for attention in layers):
        raise ToolkitError(f"gguf: llama.cpp's {gguf.arch} turns q and k, this model has ALiBi instead")
    _windows(layers, found)
    if layers:
        _queries(spec, gguf, layers[0])
    _activation(spec, gguf)
    odd = next((linear.name for linear in spec.linears() if linear.bias), None)
    if odd is not None and not gguf.biases:
        raise ToolkitError(f"gguf: llama.cpp's {gguf.arch} has no biases, this model has {odd}.bias")
    if gguf.write is not None:
        values.update(gguf.write(spec))
    if rope is not None and rope.kind == "yarn" and "rope.scaling.yarn_log_multiplier" not in values:
        times = 1.0 if rope.attention_factor is None else rope.attention_factor / yarn_scale(rope.factor)
        values.update({} if abs(times - 1) < 1e-6 else {"rope.scaling.attn_factor": times})
    folded = dict(gguf.folded(spec)) if gguf.folded is not None else {}
    if folded:
        found.notes.append(f"llama.cpp's {gguf.arch} has the multipliers in its weights, which are rounded anew")
    found.notes.extend(_bounds(spec, gguf))
    if gguf.differs:
        found.notes.append(f"llama.cpp's {gguf.arch} {gguf.differs}: there the file is another model than here")
    stated = {f"{gguf.arch}.{key}": value for key, value in values.items()}
    return ModelMetadata(gguf, stated, found.factors, found.notes, folded)


def _bounds(spec: DecoderSpec, gguf: Gguf) -> list[str]:
    least = max((mixer.least for _, mixer in spec.mixers() if mixer.kind == "mamba"), default=0.0)
    return [f"llama.cpp's {gguf.arch} knows no least step of time, the model's is {least:g}"] if least else []


def spelling(spec: DecoderSpec) -> Gguf | str:
    """Of its language model, or why there is none."""
    found = get(spec.family).gguf
    if spec.encodes and isinstance(found, Gguf):
        reads = get(spec.family).encodes
        return "encoders are not written to GGUF files yet" + (
            "" if reads else ", and this model's tokens see each other (is_causal)"
        )
    if isinstance(found, Mmproj):
        assert spec.vision is not None
        found = found.text or get(spec.vision.language).gguf
        assert not isinstance(found, Mmproj), "a language model does not see"
    return found.of(spec) if isinstance(found, Gguf) else found


def _sizes(first: AttentionSpec) -> dict[str, int]:
    return {
        "attention.head_count": first.heads,
        "attention.head_count_kv": first.kv_heads,
        "attention.key_length": first.head_dim,
        "attention.value_length": first.head_dim,
    }


def _latent_sizes(first: LatentSpec) -> dict[str, int]:
    return {
        "attention.head_count": first.heads,
        "attention.head_count_kv": first.heads,
        "attention.key_length": first.qk_dim,
        "attention.value_length": first.v_dim,
        "attention.kv_lora_rank": first.kv_rank,
        "attention.q_lora_rank": 0 if first.q_a is None else first.q_a.out_features,
    }


def _latent_scale(first: LatentSpec, gguf: Gguf) -> dict[str, float]:
    """How much YaRN scales queries, which llama.cpp has as a tenth of what config.json calls mscale_all_dim."""
    more = first.scale * first.qk_dim**0.5
    if first.rope.kind in ("default", "longrope") and abs(more - 1) < 1e-6:
        return {}
    if first.rope.kind != "yarn" or first.rope.attention_factor not in (None, 1.0):
        raise ToolkitError(f"gguf: llama.cpp's {gguf.arch} turns by YaRN with equal mscale and mscale_all_dim alone")
    return {"rope.scaling.yarn_log_multiplier": (more**0.5 - 1) / math.log(first.rope.factor)}


def unsupported(spec: DecoderSpec) -> str | None:
    """Why llama.cpp's architectures cannot hold the model, or None."""
    try:
        model_metadata(spec)
    except ToolkitError as error:
        return str(error).removeprefix("gguf: ")
    return None


def _main_rope(layers: list[AttentionSpec]) -> RopeSpec | None:
    """The rope that the file states: of the layers that see everything, where they have one."""
    ropes = [attention.rope for attention in layers if attention.window is None] + [x.rope for x in layers]
    return next((rope for rope in ropes if rope is not None), None)


def _check_ropes(layers: list[AttentionSpec], gguf: Gguf, rope: RopeSpec) -> None:
    """Raise ToolkitError where a layer turns otherwise than readers have it turn. ``rope``: the file's."""
    for attention in layers:
        if (own := attention.rope) is None:
            continue
        if attention.window is None or gguf.local == "same":
            good, does = own == rope, "turns all layers alike"
        else:
            good = own.kind == "default" and (gguf.local == "own" or own.theta == rope.theta)
            does = "turns layers that slide by an unscaled rope" + (
                " of the same base" if gguf.local == "plain" else ""
            )
        if not good:
            raise ToolkitError(f"gguf: llama.cpp's {gguf.arch} {does}, this model does not")


def _feed_forward(spec: DecoderSpec) -> int:
    mixers = [m for _, m in spec.mixers() if m.mlps()]
    first = next((m for m in mixers if m.kind == "mlp"), mixers[0] if mixers else None)
    return 0 if first is None else first.mlps()[0].up.out_features


def _experts(spec: DecoderSpec, gguf: Gguf) -> dict[str, Any]:
    layers = [m for _, m in spec.mixers() if m.kind == "moe"]
    if not layers:
        return {}
    if any(m.kind == "mlp" for _, m in spec.mixers()) and "ffn_gate" not in gguf.names:
        raise ToolkitError(
            f"gguf: llama.cpp's {gguf.arch} has experts in every layer, this model in {len(layers)} of them"
        )
    first = layers[0]
    if gguf.norm_topk not in (None, first.norm_topk):
        does = "rescales the experts' weights to sum 1" if gguf.norm_topk else "takes the experts' weights as they are"
        raise ToolkitError(f"gguf: llama.cpp's {gguf.arch} {does}; this model does not")
    sizes = {
        "expert_count": len(first.experts),
        "expert_used_count": first.top_k,
        "expert_feed_forward_length": first.experts[0].up.out_features,
        "expert_shared_feed_forward_length": first.shared.up.out_features if first.shared else 0,
    }
    stated = {"expert_count", "expert_used_count", *gguf.numbers.values()}
    return {key: value for key, value in sizes.items() if key in stated}


def _rope(rope: RopeSpec, found: ModelMetadata) -> None:
    values = found.values
    values["rope.dimension_count"] = rope.rotary_dim
    values["rope.freq_base"] = float(rope.theta)
    if rope.kind in ("linear", "yarn"):
        values["rope.scaling.type"] = rope.kind
        values["rope.scaling.factor"] = float(rope.factor)
    if rope.kind == "linear":  # readers stretch it themselves
        values["context_length"] = min(values["context_length"], round(rope.max_position / rope.factor))
    if rope.kind == "yarn":
        values["rope.scaling.original_context_length"] = rope.original_max_position
        for name, beta, usual in (("fast", rope.beta_fast, 32.0), ("slow", rope.beta_slow, 1.0)):
            if beta != usual:
                values[f"rope.scaling.yarn_beta_{name}"] = float(beta)
        if not rope.truncate:
            found.notes.append("llama.cpp lets YaRN begin and end at whole frequencies, which the model does not")
    elif rope.kind == "llama3":
        found.factors["rope_freqs.weight"] = _llama3_factors(rope)
    elif rope.kind == "longrope":
        values["rope.scaling.original_context_length"] = rope.original_max_position
        values["rope.scaling.attn_factor"] = float(1.0 if rope.attention_factor is None else rope.attention_factor)
        found.factors["rope_factors_long.weight"] = np.asarray(rope.long_factor, np.float32)
        found.factors["rope_factors_short.weight"] = np.asarray(rope.short_factor, np.float32)
    elif rope.kind == "proportional":
        if rope.factor != 1:
            raise ToolkitError(f"gguf: frequencies of which some are 0 and the others divided by {rope.factor:g}")
        still = rope.rotary_dim // 2 - rope.turning
        found.factors["rope_freqs.weight"] = np.array([1.0] * rope.turning + [STILL] * still, np.float32)
    elif rope.kind == "dynamic":
        values["context_length"] = min(values["context_length"], rope.original_max_position)
        found.notes.append(
            f"dynamic rope scaling has no place in GGUF: right up to {rope.original_max_position} tokens of context"
        )


STILL = 1e30  # what a frequency is divided by that is to be 0


def yarn_scale(factor: float) -> float:
    """What readers multiply q and k by of their own accord where they turn by YaRN."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3_factors(rope: RopeSpec) -> NDArray[np.float32]:
    """What every frequency is divided by: 1 for short wavelengths, ``factor`` for long ones, a blend between."""
    exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    rotations = rope.original_max_position / (2 * np.pi * rope.theta**exponents)
    smooth = (rotations - rope.low_freq_factor) / max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / rope.factor + smooth)).astype(np.float32)


def _windows(layers: list[AttentionSpec], found: ModelMetadata) -> None:
    windows = {attention.window for attention in layers} - {None}
    if not windows:
        return
    window = windows.pop()
    if found.gguf.window:
        found.values["attention.sliding_window"] = window
        if found.gguf.idle_window:
            found.notes.append(
                f"llama.cpp reads the sliding window of {found.gguf.arch} and sees everything: there it is the model "
                f"up to {window} tokens of context"
            )
    else:
        found.notes.append(
            f"llama.cpp's {found.gguf.arch} has no sliding window: right up to {window} tokens of context"
        )


def _activation(spec: DecoderSpec, gguf: Gguf) -> None:
    mlps = [mlp for _, mixer in spec.mixers() for mlp in mixer.mlps()]
    odd = next((mlp.activation for mlp in mlps if mlp.activation != gguf.activation), None)
    if gguf.activation is not None and odd is not None:
        raise ToolkitError(
            f"gguf: llama.cpp's {gguf.arch} has {gguf.activation} for the activation of its MLPs, this model {odd}"
        )


def _queries(spec: DecoderSpec, gguf: Gguf, first: AttentionSpec) -> None:
    scale = first.scale if gguf.scale is None else gguf.scale(spec)
    if abs(first.scale / scale - 1) > 1e-6:
        raise ToolkitError(
            f"gguf: llama.cpp scales queries of this architecture by {scale:.6g}, the model by {first.scale:.6g}"
        )
