"""What is said of LoRA adapters that do not fit, are of another kind or are broken: the whole line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, ones

from toolkit.artifacts.adapters.adapter import read_adapter, read_changes
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models.registry import load_spec

MODULE = "model.layers.0.self_attn.q_proj"
Q, HEAD, EMBED = (f"base_model.model.{name}" for name in (MODULE, "lm_head", "model.embed_tokens"))
GOOD = {f"{Q}.lora_A.weight": ones(2, 64), f"{Q}.lora_B.weight": ones(64, 2)}
MERGE = "merge the adapter into the checkpoint instead"
OTHER = "the adapter is of another model"
CONFIG, FILE = "/adapter_config.json: ", "/adapter_model.safetensors: "


def refused(model: Path, path: Path, read: Any, config: dict[str, Any], tensors: dict[str, Tensor] | None) -> str:
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config
    (path / "adapter_config.json").write_text(json.dumps(fields))
    if tensors is not None:
        save_file(tensors, path / "adapter_model.safetensors")
    spec, stored = load_spec(open_checkpoint(model))
    with pytest.raises(ToolkitError) as error:
        read(path, spec, stored)
    return str(error.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected LORA, found 'IA3'"),
        ({"bias": "all"}, f"bias: expected 'none', found 'all'; {MERGE}"),
        ({"r": "two"}, "r: expected a whole number, found 'two'"),
        ({"r": 4}, f"r: expected 2, the rank of {MODULE}'s tensors, found 4"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a number, found nan"),
        *(
            (
                {"init_lora_weights": start},
                f"init_lora_weights: found {start!r}, which changes the base weights too; convert the adapter to plain "
                "LoRA first",
            )
            for start in ("pissa", "OLoRA", "lora_ga")
        ),
        (
            {"modules_to_save": ["lm_head"]},
            "modules_to_save: expected the weight of lm_head in adapter_model.safetensors, found none",
        ),
        (
            {"use_dora": True},
            "use_dora: expected lora_magnitude_vector tensors in adapter_model.safetensors, found none",
        ),
        (
            {"alpha_pattern": {"(": 1}},
            "alpha_pattern: '(' is no regular expression: missing ), unterminated subpattern at position 9",
        ),
    ],
)
def test_configs(tiny_models: Any, tmp_path: Path, config: dict[str, Any], told: str) -> None:
    assert refused(tiny_models("llama"), tmp_path, read_adapter, config, GOOD) == CONFIG + told


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({f"{EMBED}.base_layer.weight": ones(1, 1)}, "expected low-rank matrices, found no tensors"),
        (
            {f"{Q}.lora_B.weight": ones(64, 2)},
            f"tensor {MODULE}.lora_A.weight is missing beside its partner",
        ),
        (
            GOOD | {f"{Q}.weight": ones(64, 64)},
            f"{MODULE}: expected low-rank matrices or one in its place, found both",
        ),
        (GOOD | {f"{Q}.other": ones(64, 64)}, f"tensor {Q}.other: expected names like MODULE.lora_A.weight alone"),
        (
            GOOD | {f"{Q}.lora_A.weight": ones(2, 64, dtype=torch.int32)},
            f"tensor {Q}.lora_A.weight: expected a matrix of F32, F16 or BF16, found I32 [2, 64]",
        ),
        (
            GOOD | {f"{Q}.lora_A.weight": ones(2, 63)},
            f"{MODULE}: expected lora_A [r, 64] and lora_B [64, r], found [2, 63] and [64, 2]; {OTHER}",
        ),
        (
            {f"{Q}.lora_A.weight": ones(0, 64), f"{Q}.lora_B.weight": ones(64, 0)},
            f"{MODULE}: rank: expected 1 to 128, found 0; merge the adapter instead",
        ),
        (
            GOOD | {f"{Q}.lora_A.weight": torch.full((2, 64), float("nan"))},
            f"{MODULE}.lora_A: expected finite numbers, found NaN or infinity; train or save it again",
        ),
        (
            {f"base_model.model.model.layers.9.x.lora_{side}.weight": ones(2, 2) for side in "AB"},
            f"it changes model.layers.9.x, which the model has not; {OTHER}",
        ),
        (
            {f"{HEAD}.weight": ones(320, 64)},
            "it changes lm_head, expected linears of attention or feed-forward layers alone (no embedding, head, "
            f"router, expert or kv_b_proj); {MERGE}",
        ),
    ],
)
def test_tensors(tiny_models: Any, tmp_path: Path, tensors: dict[str, Tensor], told: str) -> None:
    assert refused(tiny_models("llama"), tmp_path, read_adapter, {}, tensors) == FILE + told


def test_what_only_some_runners_add(tiny_models: Any, tmp_path: Path) -> None:
    model, no = tiny_models("llama"), f"found it of {MODULE}; this backend cannot run it, {MERGE}"
    dora = GOOD | {f"{Q}.lora_magnitude_vector": ones(64)}
    told = refused(model, tmp_path, read_adapter, {"use_dora": True}, dora)
    assert told == f"{CONFIG}use_dora: expected False, {no}"
    whole = {f"{Q}.weight": ones(64, 64)}
    told = refused(model, tmp_path, read_adapter, {"modules_to_save": ["q_proj"]}, whole)
    assert told == f"{CONFIG}modules_to_save: expected none, {no}"


@pytest.mark.parametrize(
    ("config", "tensors", "told"),
    [
        (
            {"use_dora": True},
            GOOD | {f"{Q}.lora_magnitude_vector": ones(63)},
            f"{MODULE}.lora_magnitude_vector: expected [64], found [63]; {OTHER}",
        ),
        (
            {"use_dora": True},
            {
                f"{EMBED}.lora_embedding_A": ones(2, 320),
                f"{EMBED}.lora_embedding_B": ones(64, 2),
                f"{EMBED}.lora_magnitude_vector": ones(64),
            },
            "model.embed_tokens: DoRA of an embedding does not run; merge the adapter instead",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            {f"{HEAD}.weight": ones(3, 64)},
            f"lm_head.weight: expected [320, 64], found [3, 64]; {OTHER}",
        ),
    ],
)
def test_changes(
    tiny_models: Any, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], told: str
) -> None:
    assert refused(tiny_models("llama"), tmp_path, read_changes, config, tensors) == FILE + told


def test_folders_that_hold_none(tiny_models: Any, tmp_path: Path) -> None:
    names = "adapter_model.safetensors or adapter_model.bin"
    told = refused(tiny_models("llama"), tmp_path, read_adapter, {}, None)
    assert told == f": expected {names} there; fetch or save the adapter again"
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ToolkitError) as error:
        read_adapter(tmp_path, load_spec(open_checkpoint(tiny_models("llama")))[0])
    assert str(error.value) == f"{tmp_path}: expected a PEFT adapter, found no adapter_config.json there"
