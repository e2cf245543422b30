"""Small GGUF files, written with the ``gguf`` package from tiny checkpoints as llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_NORMS = {"gemma2": {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}}  # fmt: skip


def write_gguf(
    model: Path, path: Path, kind: str = "F32", extra: dict[str, np.ndarray] | None = None, **metadata: Any
) -> Path:
    """Write the checkpoint ``model`` as GGUF with matrices of type ``kind``, ``extra`` tensors first; ``metadata``:
    keys with __ for dots.
    """
    config = json.loads((model / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])
    _add_tokenizer(writer, model)
    for key, value in metadata.items():
        _add(writer, key.replace("__", "."), value)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    for name, tensor in load_file(model / "model.safetensors").items():
        gguf_name, array = _spell(name, tensor.float().numpy(), arch, heads, kv_heads)
        wanted = Type[kind] if array.ndim > 1 else Type.F32
        writer.add_tensor(gguf_name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _spell(name: str, array: np.ndarray, arch: str, heads: int, kv_heads: int) -> tuple[str, np.ndarray]:
    if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
        n = heads if ".q_proj." in name else kv_heads
        array = array.reshape(n, 2, array.shape[0] // n // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if arch == "gemma2" and name.endswith("norm.weight"):
        array = array + 1
    for theirs, ours in {**_NORMS.get(arch, {"post_attention_layernorm": "ffn_norm"}), **_NAMES}.items():
        name = name.replace(theirs, ours)
    return name, array


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    data = json.loads((model / "tokenizer.json").read_text())
    ids = data["model"]["vocab"]
    special = {t["content"] for t in data["added_tokens"] if t["special"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def moe_parameters(file: Path, spec: Any) -> dict[str, torch.Tensor]:
    """Every parameter of a model of experts, dense under its canonical name: the tool writes such files only."""
    arrays = {}
    for t in gguf.GGUFReader(file).tensors:
        array = gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in t.shape[::-1]])
        arrays[t.name.removesuffix(".weight")] = torch.from_numpy(array.copy())
    found = {
        spec.embed: arrays["token_embd"], spec.final_norm.name: arrays["output_norm"], spec.head: arrays["output"],
    }  # fmt: skip
    for i, layer in enumerate(spec.layers):
        (attention, moe), here = layer.sublayers, f"blk.{i}."
        a, m = attention.mixer, moe.mixer
        named = {
            "attn_norm": attention.pre_norm, "ffn_norm": moe.pre_norm, "attn_q": a.q, "attn_k": a.k, "attn_v": a.v,
            "attn_output": a.o, "attn_q_norm": a.q_norm, "attn_k_norm": a.k_norm, "ffn_gate_inp": m.router,
        }  # fmt: skip
        found |= {part.name: arrays[here + role] for role, part in named.items() if part is not None}
        if spec.family == "mixtral":  # llama.cpp's llama turns neighbours, not halves
            for part, heads in ((a.q, a.heads), (a.k, a.kv_heads)):
                rows = found[part.name]
                found[part.name] = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)
        for e, expert in enumerate(m.experts):
            for part in ("gate", "up", "down"):
                found[getattr(expert, part).name] = arrays[f"{here}ffn_{part}_exps"][e]
    return found


def dequantized(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What a matrix becomes when stored as ``kind``, by the ``gguf`` package."""
    wanted = Type[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), wanted), wanted).copy())
