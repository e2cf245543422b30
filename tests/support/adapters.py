"""LoRA adapters as PEFT writes them, random, and the same models with the adapter merged into their weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def write_adapter(
    path: Path,
    model: Path,
    targets: str,
    rank: int = 4,
    seed: int = 1,
    turned: Container[str] = (),
    **config: Any,
) -> Path:
    """An adapter of the modules whose names match ``targets`` (a regular expression). ``turned``: those that stand as
    [in, out]; ``config``: further fields."""
    weights = load_file(next(model.glob("*.safetensors")))
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, w in weights.items():
        module = name.removesuffix(".weight")
        w = w.T if module in turned else w
        prefix = f"base_model.model.{module}"
        if module.rpartition(".")[2] in (config.get("modules_to_save") or ()):
            tensors[f"{prefix}.weight"] = w + torch.randn(w.shape, generator=g) * w.std() / 2
        elif w.dim() == 2 and re.search(rf"(?:{targets})$", module):
            r = next((v for k, v in config.get("rank_pattern", {}).items() if re.search(k, module)), rank)
            if module.endswith("embed_tokens"):
                tensors[f"{prefix}.lora_embedding_A"] = torch.randn(r, w.shape[0], generator=g)
                tensors[f"{prefix}.lora_embedding_B"] = torch.randn(w.shape[1], r, generator=g) * w.std()
                continue
            if config.get("use_dora"):
                lengths = w.norm(dim=1) * (1 + torch.rand(w.shape[0], generator=g))
                tensors[f"{prefix}.lora_magnitude_vector"] = lengths
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(r, w.shape[1], generator=g) / w.shape[1] ** 0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(w.shape[0], r, generator=g) * w.std()
    assert tensors, targets
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    fields |= {"target_modules": targets, "fan_in_fan_out": False, "modules_to_save": None, "use_dora": False}
    (path / "adapter_config.json").write_text(json.dumps(fields | config))
    return path


def merge(model: Path, adapter: Path, path: Path) -> Path:
    """A copy of ``model`` whose weights are W + scale · B · A, as long as DoRA has its rows, or those saved whole."""
    shutil.copytree(model, path)
    file = next(path.glob("*.safetensors"))
    weights, pairs = load_file(file), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, a in pairs.items():
        if ".lora_" not in name:
            weights[name.removeprefix("base_model.model.")] = a
        if "_A" not in name:
            continue
        module = re.sub(r"\.lora_(embedding_)?A(\.weight)?$", "", name.removeprefix("base_model.model."))
        alpha = next(
            (v for k, v in config.get("alpha_pattern", {}).items() if re.search(k, module)), config["lora_alpha"]
        )
        scale = alpha / (a.shape[0] ** 0.5 if config.get("use_rslora") else a.shape[0])
        added = scale * pairs[name.replace("_A", "_B")] @ a
        w = weights[f"{module}.weight"]
        w += added.T if "embedding" in name else added
        if (size := pairs.get(f"base_model.model.{module}.lora_magnitude_vector")) is not None:
            w *= (size / w.norm(dim=1))[:, None]
    file.unlink()
    save_file(weights, file, {"format": "pt"})
    return path
