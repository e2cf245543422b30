"""Checkpoints as they were published before safetensors: pytorch_model-….bin, Meta's consolidated.00.pth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def as_pickled(source: Path, target: Path, shards: int = 2, **options: Any) -> Path:
    """The checkpoint ``source`` with its weights in files of torch.save (``options``: of that); one without index where
    ``shards`` is 1."""
    import torch

    tensors = _side_files_and_tensors(source, target)
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" if shards > 1 else "pytorch_model.bin"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        torch.save({name: tensors[name] for name in part}, target / file, **options)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (target / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def as_meta(source: Path, target: Path, parts: int = 1, embed_rows: bool = False) -> Path:
    """A Llama in Meta's layout: its names, neighbouring numbers of a head turned together. ``parts``: files, each with
    a part of each matrix; ``embed_rows``: of embeddings some rows, as from Llama 3 on, not columns."""
    import torch

    from toolkit.artifacts.weight_files.meta_llama import _INSIDE, _WHOLE

    theirs = {ours: name for name, ours in (_INSIDE | _WHOLE).items()}
    config = json.loads((source / "config.json").read_text())
    heads = {"attention.wq": config["num_attention_heads"], "attention.wk": config["num_key_value_heads"]}
    found = {"rope.freqs": torch.zeros(4)}
    for name, tensor in _side_files_and_tensors(source, target).items():
        stem = name.removesuffix(".weight")
        layer = stem.removeprefix("model.layers.").partition(".")[0] if ".layers." in stem else None
        short = theirs[stem if layer is None else stem.removeprefix(f"model.layers.{layer}.")]
        if short in heads:
            size = tensor.shape[0] // heads[short]
            tensor = tensor.view(heads[short], 2, size // 2, -1).transpose(1, 2).reshape(tensor.shape)
        found[f"{short}.weight" if layer is None else f"layers.{layer}.{short}.weight"] = tensor
    side_by_side = ("wo.weight", "w2.weight", *(() if embed_rows else ("tok_embeddings.weight",)))
    for i in range(parts):
        own = {
            name: x if x.dim() < 2 else x.chunk(parts, 1 if name.endswith(side_by_side) else 0)[i].clone()
            for name, x in found.items()
        }
        torch.save(own, target / f"consolidated.{i:02d}.pth")
    (target / "config.json").unlink()
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "vocab_size": -1,
    }
    (target / "params.json").write_text(json.dumps(params))
    return target


def _side_files_and_tensors(source: Path, target: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    ignored = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "manifest.json")
    shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    return {name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()}
