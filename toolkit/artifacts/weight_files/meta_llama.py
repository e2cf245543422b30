"""Meta's own layout of Llama 1 to 3.2: ``params.json`` beside ``consolidated.00.pth``, by Hugging Face's names.

Source: https://github.com/meta-llama/llama-models (``models/llama3/args.py``, ``model.py``). Its rope turns
neighbouring numbers of a head, ours (transformers') the halves, so the rows of q and k are read in another order.
Larger models stand in a file for each GPU that they were trained to run on, with a part of every matrix.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.weight_files.find import file_headers
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

PARAMS, WEIGHTS = "params.json", "consolidated.00.pth"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_WHOLE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WIDE = ("attention.wo.weight", "feed_forward.w2.weight")  # whose parts stand side by side, not one below the other
_PART = re.compile(r"consolidated\.\d\d\.pth")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# What params.json does not say: tokens that the model was trained on, by the size of its vocabulary.
_LENGTHS = {32000: 4096, 32016: 16384, 128256: 8192}
_ENDS = {128256: (128000, [128001, 128008, 128009])}  # begin and ends of text; of all others 1 and 2


def is_meta_llama(directory: Path) -> bool:
    """Whether a directory is in Meta's layout, and in no other."""
    there = all((directory / name).is_file() for name in (PARAMS, WEIGHTS))
    return there and not (directory / "config.json").is_file()


@dataclass(frozen=True)
class Split:
    """A tensor of which several files hold a part: how many, and along which axis they are joined."""

    axis: int
    parts: tuple[tuple[Path, TensorInfo], ...]


@dataclass(frozen=True)
class MetaFiles:
    """config.json's fields, and tensors by Hugging Face's names. ``files``: the first one that holds it, or a part."""

    config: dict[str, Any]
    infos: dict[str, TensorInfo]
    files: dict[str, Path]
    splits: dict[str, Split]


def open_meta_llama(directory: Path) -> MetaFiles:
    """Read the headers. Raises ToolkitError, one line, also where a part lacks or is of another model."""
    params = read_json_object(directory / PARAMS)
    heads = _count(directory, params, "n_heads")
    kv_heads = _count(directory, params, "n_kv_heads") if params.get("n_kv_heads") is not None else heads
    files = _parts(directory)
    if heads % len(files) or kv_heads % len(files):
        raise ToolkitError(
            f"{directory}: expected parts that share {heads} heads and {kv_heads} of keys evenly, found {len(files)} "
            "files; convert it with transformers' convert_llama_weights_to_hf first"
        )
    headers = [header for _, header in file_headers(files)]
    infos: dict[str, TensorInfo] = {}
    splits: dict[str, Split] = {}
    for name, first in headers[0].items():
        if name == "rope.freqs":
            continue
        ours = _renamed(files[0], name)
        found = [_of(file, header, name) for file, header in zip(files, headers, strict=True)]
        if len(files) == 1 or len(first.shape) < 2:  # norms stand in each part
            infos[ours] = _halves(files[0], name, first, heads, kv_heads)
            continue
        axis = _axis(name, first, params)
        _check_parts(files, name, found)
        own = [
            _halves(file, name, info, heads // len(files), kv_heads // len(files))
            for file, info in zip(files, found, strict=True)
        ]
        splits[ours] = Split(axis, tuple(zip(files, own, strict=True)))
        shape = tuple(size * len(files) if at == axis else size for at, size in enumerate(first.shape))
        infos[ours] = TensorInfo(first.dtype, shape, 0, sum(info.nbytes for info in found))
    config = _config(directory, params, infos, heads, kv_heads)
    return MetaFiles(config, infos, dict.fromkeys(infos, files[0]), splits)


def _parts(directory: Path) -> list[Path]:
    """The files, in order. Raises ToolkitError where one between others lacks."""
    names = sorted(path.name for path in directory.glob("consolidated.*.pth") if _PART.fullmatch(path.name))
    for number, name in enumerate(names):
        if name != (expected := f"consolidated.{number:02d}.pth"):
            raise ToolkitError(f"{directory / expected}: missing, though {name} is there; fetch the model again")
    return [directory / name for name in names]


def _of(file: Path, header: dict[str, TensorInfo], name: str) -> TensorInfo:
    if name not in header:
        raise ToolkitError(f"{file}: tensor {name} is missing, though {WEIGHTS} has it; fetch the model again")
    return header[name]


def _axis(name: str, part: TensorInfo, params: dict[str, Any]) -> int:
    """Along which parts are joined. Those of embeddings have all columns from Llama 3 on, all rows before."""
    if name == "tok_embeddings.weight":
        return 0 if part.shape[1] == params.get("dim") else 1
    return 1 if name.endswith(_WIDE) else 0


def _check_parts(files: list[Path], name: str, parts: list[TensorInfo]) -> None:
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        if (part.dtype, part.shape) != (first.dtype, first.shape) or len(part.shape) != 2:
            raise ToolkitError(f"{file}: tensor {name}: expected {first}, as in {WEIGHTS}, found {part}")


def _count(directory: Path, params: dict[str, Any], name: str) -> int:
    found = params.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ToolkitError(f"{directory / PARAMS}: {name}: expected a whole number from 1 up, found {found!r:.40}")
    return found


def _renamed(file: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    found = _WHOLE.get(stem) if layer is None else _INSIDE.get(layer[2])
    if found is None or kind != "weight":
        raise ToolkitError(f"{file}: tensor {name}: expected those of Meta's Llama 1 to 3.2 alone")
    return f"{found}.weight" if layer is None else f"model.layers.{layer[1]}.{found}.weight"


def _halves(file: Path, name: str, info: TensorInfo, heads: int, kv_heads: int) -> TensorInfo:
    """q's and k's rows with the numbers of a head that are turned together half a head apart."""
    count = heads if name.endswith("attention.wq.weight") else kv_heads
    if not name.endswith(("attention.wq.weight", "attention.wk.weight")):
        return info
    if len(info.shape) != 2 or info.shape[0] % (2 * count) or info.view is not None:
        raise ToolkitError(f"{file}: tensor {name}: expected a matrix of {count} heads' rows, found {info}")
    rows, columns = info.shape
    half = rows // count // 2
    return replace(info, view=((count, 2, half, columns), (2 * half * columns, columns, 2 * columns, 1)))


def _config(
    directory: Path, params: dict[str, Any], infos: dict[str, TensorInfo], heads: int, kv_heads: int
) -> dict[str, Any]:
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"):
        if name not in infos or len(infos[name].shape) != 2:
            raise ToolkitError(f"{directory / WEIGHTS}: expected the tensors of Meta's Llama, found no matrix {name}")
    embed = infos["model.embed_tokens.weight"]
    vocab = embed.shape[0]
    begin, ends = _ENDS.get(vocab, (1, 2))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _count(directory, params, "dim"),
        "intermediate_size": infos["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": _count(directory, params, "n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": params.get("rope_theta", 10000.0),
        "vocab_size": vocab,
        "max_position_embeddings": _LENGTHS.get(vocab, 4096),
        "tie_word_embeddings": "lm_head.weight" not in infos,
        "torch_dtype": _DTYPES.get(embed.dtype, "float32"),
        "bos_token_id": begin,
        "eos_token_id": ends,
    }
    if params.get("use_scaled_rope"):
        # 3.1 and 3.2 differ in the factor alone, which no file states: the small ones, with a tied head, are of 3.2.
        factor = 32.0 if config["tie_word_embeddings"] or config["hidden_size"] < 4096 else 8.0
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config["max_position_embeddings"] = 131072
    return config
