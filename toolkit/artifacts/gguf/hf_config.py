"""A GGUF file's metadata as the ``config.json`` of the model that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.gguf.keys import Keys
from toolkit.artifacts.gguf.metadata import yarn_scale
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.drafts.mtp import FURTHER
from toolkit.models.family import Family
from toolkit.models.gguf import MOST_LAYERS, Absent, Gguf, read_betas

_FACTOR = ("rope.scaling.factor", "rope.scale_linear")  # the second in files of 2023
KV_HEADS = "attention.head_count_kv"
NEXTN = "nextn_predict_layers"  # how many of the blocks are for multi-token prediction, behind the model's


@dataclass(frozen=True)
class _Reader(Keys):
    """``toolkit.models.gguf.Metadata`` of an architecture's keys."""

    tensors: Mapping[str, TensorInfo]
    factors: Sequence[float] = ()

    def has(self, key: str) -> bool:
        value = self.value(key)
        return value is not None and not (isinstance(value, int) and value == 0)

    def states(self, key: str) -> bool:
        """Whether it is anything else than a 0 that the file states, so that ``whole`` refuses what is not there."""
        value = self.value(key)
        return isinstance(value, bool) or not isinstance(value, int) or value != 0

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if isinstance(value, np.ndarray) and len(found := np.unique(value[value != 0])) == 1:
            value = found[0].item()  # one entry a layer, 0 where the layer has nothing of the kind
        return self.positive(key, value)

    def stated(self, key: str, absent: Absent) -> int | Absent:
        return self.whole(key) if self.has(key) else absent

    def flags(self, key: str) -> list[bool] | None:
        value = self.value(key)
        return [bool(x) for x in value] if isinstance(value, np.ndarray) else None

    def each(self, key: str, count: int) -> list[int]:
        value = self.value(key)
        if isinstance(value, int):
            return [value] * count
        if not isinstance(value, np.ndarray) or value.size != count or value.dtype.kind not in "iu":
            raise ToolkitError(f"{self.path}: {self.prefix}.{key}: expected {count} whole numbers, found {value!r:.60}")
        return [int(x) for x in value]

    def first(self, key: str) -> int:
        """Of a number that layers may have each for itself that of the first."""
        value = self.value(key)
        return self.positive(key, value[0].item() if isinstance(value, np.ndarray) and len(value) else value)

    def rows(self, tensor: str) -> int:
        return self.tensors[tensor].shape[0] if tensor in self.tensors else 0


def hf_config(
    path: Path,
    family: Family,
    gguf: Gguf,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    rope_factors: Mapping[str, NDArray[np.float32]],
) -> dict[str, Any]:
    """``config.json`` of the model. ``rope_factors``: the tensors that hold frequency factors, by name.

    Raises ToolkitError that names the file and the metadata key for a missing or impossible value.
    """
    factors = rope_factors.get("rope_freqs.weight", np.empty(0, np.float32)).tolist()
    read = _Reader(path, metadata, gguf.arch, tensors, factors)
    number = read.first if gguf.varied else read.whole
    hidden, layers = read.whole("embedding_length"), read.whole("block_count")
    if layers > MOST_LAYERS:
        raise ToolkitError(f"{path}: {gguf.arch}.block_count: expected at most {MOST_LAYERS}, found {layers}")
    further = read.stated(NEXTN, 0)
    if further >= layers:
        raise ToolkitError(f"{path}: {gguf.arch}.{NEXTN}: expected fewer than {layers} layers, found {further}")
    layers -= further
    attends = read.states("attention.head_count")  # 0: it has no attention
    heads = read.whole("attention.head_count") if attends else 1
    head_dim = read.whole("attention.key_length", max(hidden // heads, 1))
    if "token_embd.weight" not in tensors:
        raise ToolkitError(f"{path}: tensor token_embd.weight is missing; fetch the file again")
    tokenizer = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    config: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.name,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length") if read.states("feed_forward_length") else hidden,
        "num_hidden_layers": layers,
        **({FURTHER: further} if further else {}),
        **({"is_causal": False} if read.value("attention.causal") is False and not family.encodes else {}),
        "num_attention_heads": heads,
        "num_key_value_heads": number(KV_HEADS) if attends and read.has(KV_HEADS) else heads,
        "head_dim": head_dim,
        "max_position_embeddings": read.whole("context_length"),
        gguf.eps: read.number(gguf.eps_key),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": tokenizer["bos"],
        "eos_token_id": tokenizer["eos"],
        "pad_token_id": tokenizer["padding"],
        **gguf.fields,
        **{name: read.whole(key) for name, key in gguf.numbers.items()},
        "torch_dtype": _dtype(tensors),
    }
    rotary = read.whole("rope.dimension_count", head_dim)
    if rotary < head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if gguf.read is not None:
        config.update(gguf.read(read, config))
    if "rope_parameters" not in config and (scaling := _rope_scaling(read, config, rope_factors)):
        config["rope_scaling"] = scaling
    return config


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    kinds = {info.dtype for info in tensors.values() if len(info.shape) > 1}
    rest = kinds - {"F32"}  # which routers and the weights of convolutions always are
    return "float32" if not rest else "float16" if rest == {"F16"} else "bfloat16"


def _rope_scaling(
    read: _Reader, config: dict[str, Any], factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any] | None:
    original = read.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        config["original_max_position_embeddings"] = original
        stated = read.value("rope.scaling.attn_factor") is not None
        return {
            **({"attention_factor": read.number("rope.scaling.attn_factor")} if stated else {}),
            "type": "longrope",
            "short_factor": _decimals(factors["rope_factors_short.weight"]),
            "long_factor": _decimals(factors["rope_factors_long.weight"]),
        }
    if "rope_freqs.weight" in factors:
        return _llama3_scaling(factors["rope_freqs.weight"], config)
    kind = read.value("rope.scaling.type", "linear")  # so llama.cpp takes it where a file does not say
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise read.fail("rope.scaling.type", kind, "linear or yarn")
    if kind == "linear":
        told = next((key for key in _FACTOR if read.value(key) is not None), None)
        factor = 0.0 if told is None else read.number(told)
        return None if factor in (0.0, 1.0) else {"rope_type": kind, "factor": factor}
    scaling = {"rope_type": kind, "factor": read.number("rope.scaling.factor")}
    scaling |= {"original_max_position_embeddings": original, **read_betas(read)}
    if read.value("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = read.number("rope.scaling.attn_factor") * yarn_scale(scaling["factor"])
    return scaling


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
