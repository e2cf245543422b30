"""``tool lite merge`` against weights that torch has merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from toolkit.artifacts.manifest import read_manifest
from toolkit.commands.main import main
from toolkit.errors import ToolkitError, UsageError
from toolkit.quant.merge import merge


@pytest.mark.parametrize(
    "family, targets, config",
    [
        ("llama", "[qv]_proj|down_proj|lm_head|embed_tokens", {"use_rslora": True}),
        ("phi3", "qkv_proj|gate_up_proj", {"use_dora": True, "modules_to_save": ["lm_head"]}),
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
