"""Checkpoints as they are on the hub: language models inside of ones that see, experts apart, configs of old and new
spelling, and tensors that nothing here computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, left_out, validate_checkpoint
from toolkit.convert.formats import rewrite
from toolkit.errors import ToolkitError
from toolkit.models.registry import build, families, load_spec
from toolkit.models.tiny import SIZES

# Family → the class that its models are published as, and how names of tensors begin there.
WITHIN = {
    "qwen3_5_text": ("Qwen3_5ForConditionalGeneration", "model.language_model.", ""),
    "qwen3_5_moe_text": ("Qwen3_5MoeForConditionalGeneration", "model.language_model.", ""),
    "llama4_text": ("Llama4ForConditionalGeneration", "language_model.model.", "language_model."),
}
OTHERS = {
    "model.visual.blocks.0.attn.qkv.weight": torch.zeros(4, 4),
    "mtp.layers.0.mlp.up_proj.weight": torch.zeros(4, 4),
    "mtp.fc.weight": torch.zeros(4, 4),
}


def published(path: Path, target: Path, architecture: str, body: str, head: str, stacked: bool) -> None:
    """The checkpoint at ``path`` as the language part of a model that sees; ``stacked``: with its experts in two
    tensors a layer, gate above up in one."""
    tensors = load_file(path / "model.safetensors")
    for layer in range(3 if stacked else 0):
        stem = f"model.layers.{layer}.mlp.experts"
        count = sum(name.startswith(stem) and name.endswith("up_proj.weight") for name in tensors)
        each = [[tensors.pop(f"{stem}.{e}.{x}_proj.weight") for x in ("gate", "up", "down")] for e in range(count)]
        tensors[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(matrices[:2]) for matrices in each])
        tensors[f"{stem}.down_proj"] = torch.stack([matrices[2] for matrices in each])
    inside = {
        body + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
        for name, tensor in tensors.items()
    }
    config = json.loads((path / "config.json").read_text())
    whole = {"architectures": [architecture], "model_type": "whole", "text_config": config, "vision_config": {}}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(whole))
    save_file(inside | OTHERS, target / "model.safetensors")


@pytest.mark.parametrize("family, stacked", [*((name, False) for name in WITHIN), ("qwen3_5_moe_text", True)])
def test_the_language_part_of_a_model_that_sees(family: str, stacked: bool, tiny_models: Any, tmp_path: Path) -> None:
    path = tiny_models(family)
    published(path, tmp_path / "whole", *WITHIN[family], stacked=stacked)
    plain, whole = open_checkpoint(path), open_checkpoint(tmp_path / "whole")
    (spec, stored), (expected, expected_stored) = load_spec(whole), load_spec(plain)
    validate_checkpoint(whole, stored)
    assert spec == expected
    weights, other = canonical_weights(whole, stored), canonical_weights(plain, expected_stored)
    assert weights.keys() == other.keys()
    for name, weight in other.items():
        found = weights[name]
        same = (found, weight) if isinstance(weight, torch.Tensor) else (found.dequantize(), weight.dequantize())
        assert torch.equal(*same), name
    assert "3 tensors" in left_out(whole, stored) and "mtp.fc" in left_out(whole, stored)
    assert left_out(plain, expected_stored) == ""
    with pytest.raises(ToolkitError, match="would be lost"):
        rewrite(str(tmp_path / "whole"), tmp_path / "hf", to="hf", quiet=True)


def test_a_head_that_copies_the_embedding_is_not_left_out(tiny_models: Any, tmp_path: Path) -> None:
    tensors = load_file(tiny_models("gemma") / "model.safetensors")
    copied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(copied, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_models("gemma") / "config.json").read_text())
    checkpoint = open_checkpoint(tmp_path)
    stored = load_spec(checkpoint)[1]
    validate_checkpoint(checkpoint, stored)
    assert left_out(checkpoint, stored) == ""


def test_rope_of_old_configs_is_that_of_new_ones() -> None:
    """``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling`` with its ``type`` for ``rope_parameters``."""
    tried = 0
    scaled = ("apertus", "gpt_oss")  # old files of these that say nothing mean a scaling, not none
    for family in families():
        for tiny in family.tiny if family.recipe is None and family.name not in scaled else ():
            new = {**SIZES, **tiny.fields, "architectures": [family.architectures[0]]}
            rope = dict(new.get("rope_parameters") or {})
            if not rope or any(isinstance(value, dict) for value in rope.values()):
                continue
            apart = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
            kind = rope.pop("rope_type")
            scaling = {"rope_scaling": {"type": kind, **rope}} if kind != "default" else {}
            old = {name: value for name, value in new.items() if name != "rope_parameters"}
            assert build(old | apart | scaling)[0] == build(new)[0], family.name
            tried += 1
    assert tried > 15
