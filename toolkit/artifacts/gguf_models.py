"""GGUF architectures in Hugging Face terms: config.json fields, tensor names, and llama.cpp's rearrangements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.safetensors_file import TensorInfo
from toolkit.errors import ToolkitError

# What has to be undone: rows of q and k interleaved for llama.cpp's rope, or 1 added to norm weights.
Change = Literal["none", "q_rows", "k_rows", "norm"]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE_MLP = ("ffn_gate", "ffn_up", "ffn_down")
EXPERTS = "_exps"  # how the stem of a tensor ends that stacks all experts' matrices of a layer: [experts, out, in]
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


@dataclass(frozen=True)
class GgufArch:
    """How one value of ``general.architecture`` is spelled as a Hugging Face model.

    ``names``: GGUF's name inside a layer → Hugging Face's, with {} for the expert. ``fields``: constants of the config;
    ``numbers``: its fields that the metadata states, by key.
    """

    model_type: str
    class_name: str
    names: dict[str, str]
    interleaved_qk: bool = False
    norm_plus_one: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)


def _with_experts(prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of a layer whose MLP is a mixture of experts."""
    attention = {theirs: ours for theirs, ours in _BLOCK.items() if theirs not in _DENSE_MLP}
    matrices = {"ffn_gate": gate, "ffn_up": up, "ffn_down": down}
    stacked = {f"{theirs}{EXPERTS}": f"{prefix}.experts.{{}}.{ours}" for theirs, ours in matrices.items()}
    return {**attention, "ffn_gate_inp": f"{prefix}.gate", **stacked}


ARCHS: dict[str, GgufArch] = {
    "llama": GgufArch("llama", "LlamaForCausalLM", _BLOCK, interleaved_qk=True, fields={"hidden_act": "silu"}),
    "qwen2": GgufArch("qwen2", "Qwen2ForCausalLM", _BLOCK, fields={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": GgufArch(
        "qwen3",
        "Qwen3ForCausalLM",
        {**_BLOCK, **_QK_NORM},
        fields={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    ),
    "qwen3moe": GgufArch(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_with_experts("mlp", "gate_proj", "up_proj", "down_proj"), **_QK_NORM},
        fields={
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "norm_topk_prob": True,  # llama.cpp knows no other way
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        },
        numbers={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
    ),
    "gemma2": GgufArch(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            **_BLOCK,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_plus_one=True,
        fields={
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
        },
    ),
    "phi3": GgufArch(
        "phi3",
        "Phi3ForCausalLM",
        {**_BLOCK, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        fields={"hidden_act": "silu"},
    ),
}

MIXTRAL = GgufArch(  # which llama.cpp takes for a llama with experts
    "mixtral",
    "MixtralForCausalLM",
    _with_experts("block_sparse_moe", "w1", "w3", "w2"),
    interleaved_qk=True,
    fields={"hidden_act": "silu", "sliding_window": None},
    numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)


def arch_of(path: Path, metadata: Mapping[str, Any]) -> GgufArch:
    """The architecture of a file. Raises ToolkitError for an unknown one, with those known."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHS:
        raise ToolkitError(f"{path}: general.architecture: expected one of {', '.join(ARCHS)}, found {name!r:.60}")
    experts = metadata.get(f"{name}.expert_count", 0)
    if ARCHS[name].numbers or (isinstance(experts, int) and not experts):
        return ARCHS[name]
    if name == "llama":
        return MIXTRAL
    raise ToolkitError(f"{path}: {name} with experts cannot be read from GGUF; give the safetensors checkpoint")


def hf_names(path: Path, arch: GgufArch, tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[str, Change]]:
    """Hugging Face name, with {} for the expert where the tensor holds all of a layer → (GGUF name, what to undo).

    Raises ToolkitError for a tensor that has no place.
    """
    found: dict[str, tuple[str, Change]] = {}
    for name in tensors:
        if name in _NOT_WEIGHTS:
            continue
        stem, _, suffix = name.rpartition(".")
        parts = stem.split(".", 2)
        if stem in _TOP:
            target = _TOP[stem]
        elif len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in arch.names:
            target = f"model.layers.{int(parts[1])}.{arch.names[parts[2]]}"
        else:
            raise ToolkitError(f"{path}: tensor {name!r:.80} has no place in {arch.class_name}")
        change: Change = "none"
        if arch.interleaved_qk and parts[-1] in ("attn_q", "attn_k"):
            change = "q_rows" if parts[-1] == "attn_q" else "k_rows"
        elif arch.norm_plus_one and suffix == "weight" and stem.endswith("norm"):
            change = "norm"
        found[f"{target}.{suffix}"] = (name, change)
    return found


def unstacked(path: Path, name: str, source: str, info: TensorInfo, experts: int) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors by Hugging Face name that the tensor ``source`` of the file holds: itself, or one an expert where
    ``name`` has {} in it. Raises ToolkitError where its dimensions are not those of ``name``.
    """
    stacked = "{}" in name
    flat = not stacked and len(info.shape) == 1 and info.dtype in ("F32", "F16", "BF16")
    if not flat and len(info.shape) != (3 if stacked else 2):
        raise ToolkitError(f"{path}: tensor {source}: {info} cannot be {name}")
    if not stacked:
        yield name, info
        return
    if info.shape[0] != experts:
        raise ToolkitError(f"{path}: tensor {source}: expected {experts} experts, found {info}")
    size = info.nbytes // experts
    for i in range(experts):
        start = info.start + i * size
        yield name.format(i), replace(info, shape=info.shape[1:], start=start, end=start + size)


def row_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Where each row of a q or k projection stands in the file, whose heads have their two halves interleaved."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class _Reader:
    """Typed access to ``<arch>.<key>`` entries."""

    path: Path
    metadata: Mapping[str, Any]
    prefix: str

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # some writers give a list, one entry a layer
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise ToolkitError(
                f"{self.path}: {self.prefix}.{key}: expected a positive whole number, found {value!r:.40}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise ToolkitError(f"{self.path}: {self.prefix}.{key}: expected a number, found {value!r:.40}")
        return float(str(np.float32(value)))  # stored as float32: 9.99999975e-06 is 1e-05


def hf_config(
    path: Path,
    arch: GgufArch,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    rope_factors: Mapping[str, NDArray[np.float32]],
) -> dict[str, Any]:
    """``config.json`` of the model. ``rope_factors``: the tensors that hold frequency factors, by name.

    Raises ToolkitError that names the file and the metadata key for a missing or impossible value.
    """
    read = _Reader(path, metadata, str(metadata["general.architecture"]))
    heads, hidden = read.whole("attention.head_count"), read.whole("embedding_length")
    head_dim = read.whole("attention.key_length", max(hidden // heads, 1))
    if "token_embd.weight" not in tensors:
        raise ToolkitError(f"{path}: tensor token_embd.weight is missing; fetch the file again")
    tokenizer = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    config: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": read.whole("feed_forward_length"),
        "num_hidden_layers": read.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.whole("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": tokenizer["bos"],
        "eos_token_id": tokenizer["eos"],
        "pad_token_id": tokenizer["padding"],
        **arch.fields,
        **{name: read.whole(key) for name, key in arch.numbers.items()},
        "torch_dtype": _dtype(tensors),
    }
    if arch.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    rotary = read.whole("rope.dimension_count", head_dim)
    if rotary < head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if arch.model_type == "phi3":
        config["sliding_window"] = metadata.get("phi3.attention.sliding_window") or None
    if arch.model_type == "gemma2":
        config.update(_gemma2_fields(read, hidden, heads, head_dim))
    if scaling := _rope_scaling(read, config, rope_factors):
        config["rope_scaling"] = scaling
    return config


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    matrices = {name: info for name, info in tensors.items() if len(info.shape) > 1}
    kinds = {info.dtype for name, info in matrices.items() if not name.endswith("ffn_gate_inp.weight")}  # always F32
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _gemma2_fields(read: _Reader, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    # The file does not state the query scale; the 27B model, of 46 layers, is the one that departs from head_dim.
    return {
        "attn_logit_softcapping": read.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": read.number("final_logit_softcapping", 30.0),
        "sliding_window": read.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": hidden // heads if read.whole("block_count") == 46 else head_dim,
    }


def _rope_scaling(
    read: _Reader, config: dict[str, Any], factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any] | None:
    original = read.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        config["original_max_position_embeddings"] = original
        stated = f"{read.prefix}.rope.scaling.attn_factor" in read.metadata
        return {
            **({"attention_factor": read.number("rope.scaling.attn_factor")} if stated else {}),
            "type": "longrope",
            "short_factor": _decimals(factors["rope_factors_short.weight"]),
            "long_factor": _decimals(factors["rope_factors_long.weight"]),
        }
    if "rope_freqs.weight" in factors:
        return _llama3_scaling(factors["rope_freqs.weight"], config)
    kind = read.metadata.get(f"{read.prefix}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ToolkitError(f"{read.path}: {read.prefix}.rope.scaling.type: expected linear or yarn, found {kind!r:.40}")
    scaling = {"rope_type": kind, "factor": read.number("rope.scaling.factor")}
    return scaling if kind == "linear" else {**scaling, "original_max_position_embeddings": original}


def _decimals(values: NDArray[np.float32]) -> list[float]:
    return [float(str(value)) for value in values]


def _llama3_scaling(factors: NDArray[np.float32], config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, which the file holds as one factor a frequency; any other factors are kept as they are."""
    largest = round(float(factors.max()), 4)
    wave = 2 * np.pi * config["rope_theta"] ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((8192 / wave - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / largest + smooth)
    if np.allclose(factors, expected, rtol=1e-3):
        return {
            "rope_type": "llama3",
            "factor": largest,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    same = _decimals(factors)
    return {
        "rope_type": "longrope",
        "short_factor": same,
        "long_factor": same,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "attention_factor": 1.0,
    }
