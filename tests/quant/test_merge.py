"""``tool lite merge`` against weights that torch has merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.manifest import read_manifest
from toolkit.commands.main import main
from toolkit.errors import ToolkitError, UsageError
from toolkit.quant.merge import merge


@pytest.mark.parametrize(
    "family, targets, config",
    [
        ("llama", "[qv]_proj|down_proj|lm_head|embed_tokens", {"use_rslora": True}),
        ("phi3", "qkv_proj|gate_up_proj", {"use_dora": True, "modules_to_save": ["lm_head"]}),
        ("gemma4_text", "o_proj|per_layer_input_gate|per_layer_model_projection", {}),
    ],
)
def test_a_merged_checkpoint(
    family: str, targets: str, config: Any, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    model, adapters = tiny_models(family), support("adapters")
    made = adapters.write_adapter(tmp_path / "one", model, targets, **config)
    expected = load_file(next(adapters.merge(model, made, tmp_path / "expected").glob("*.safetensors")))
    assert merge(str(model), str(made), tmp_path / "merged") > 0
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    manifest = read_manifest(tmp_path / "merged")
    assert manifest is not None and manifest.options["adapter"] == str(made)
    with pytest.raises(SystemExit) as ended:  # it is there already
        main(["lite", "merge", str(model), str(made), "--work-dir", str(tmp_path / "merged")])
    assert ended.value.code == 0


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])  # [experts, in, out]; [experts, out, in]
def test_experts_that_the_checkpoint_stacks(family: str, tiny_models: Any, tmp_path: Path) -> None:
    """As PEFT writes them (target_parameters), of layer 0 alone; all else stays."""
    model, g, rank = tiny_models(family), torch.Generator().manual_seed(3), 3
    weights = load_file(model / "model.safetensors")
    inside = "mlp.experts" if family == "gpt_oss" else "block_sparse_moe"
    stacks = [n for n, w in weights.items() if n.startswith(f"model.layers.0.{inside}") and w.dim() == 3]
    assert len(stacks) == 2
    tensors = {}
    for name, place in zip(
        sorted(stacks, key=lambda n: "down" in n or "output" in n), (".base_layer", ""), strict=True
    ):
        turned = weights[name].transpose(1, 2) if family == "gpt_oss" else weights[name]
        count, rows, columns = turned.shape
        a = torch.randn(count * rank, columns, generator=g) / 8
        b = torch.randn(rows, count * rank, generator=g) / 8
        begin = f"base_model.model.model.layers.0.mlp.experts{place}"
        tensors |= {f"{begin}.lora_A.weight": a, f"{begin}.lora_B.weight": b}
        # ParamWrapper.get_delta_weight in peft/tuners/lora/layer.py
        turned += torch.einsum("o r e, e r i -> e o i", b.view(rows, rank, count), a.view(count, rank, -1)) * 6 / rank
    (made := tmp_path / "made").mkdir()
    save_file(tensors, made / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_parameters": ["gate_up_proj", "down_proj"]}
    (made / "adapter_config.json").write_text(json.dumps(fields))
    merge(str(model), str(made), tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(merged[name], tensor)


def test_what_cannot_be_merged(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    write = support("adapters").write_adapter
    made = write(tmp_path / "a", tiny_models("llama"), "q_proj")
    with pytest.raises(ToolkitError, match="the adapter is of another model"):
        merge(str(tiny_models("llama", hidden_size=96)), str(made), tmp_path / "out")
    tied = tiny_models("llama", tie_word_embeddings=True)
    shared = write(tmp_path / "b", tied, "embed_tokens")
    with pytest.raises(ToolkitError, match="head and embedding are one matrix here"):
        merge(str(tied), str(shared), tmp_path / "out")
    for missing in (str(tmp_path / "none"), "demo"):  # there is a demo model, no adapter of that name
        with pytest.raises(UsageError, match=r"^ADAPTER: .*: no such directory, and not a hub id \(owner/name\)$"):
            merge(str(tiny_models("llama")), missing, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_beyond_the_type_are_refused(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file({name: w.half() for name, w in weights.items()}, model / "model.safetensors", {"format": "pt"})
    made = support("adapters").write_adapter(tmp_path / "a", model, "q_proj", lora_alpha=10**8)
    with pytest.raises(
        ToolkitError, match=r"q_proj\.weight: .*: expected numbers up to 65504, as float16 has them; found"
    ):
        merge(str(model), str(made), tmp_path / "out")
    assert not (tmp_path / "out").exists()
